"""Self-contained HTML: a page for the disk, a frame for a notebook. Nothing is fetched.

Everything that comes from a trace is escaped, or is JSON in which `<` is escaped, so that no token can end a script.
In a notebook the page is the `srcdoc` of a sandboxed frame: its script runs, but apart from the notebook.
"""

from __future__ import annotations

import html
import json
import re
from functools import cache
from importlib import resources
from typing import Any

FRAME_HEIGHT = 640  # px, until the page inside has said its own
_IMPORTS = re.compile(r'^import [^;]*?from "\./[\w.]+";\n', re.MULTILINE)
_START = """
mount({ payload: JSON.parse(document.getElementById("payload").textContent),
  el: document.getElementById("view"), host: null });"""


def page(title: str, text: str, picture: str | None = None, payload: dict[str, Any] | None = None) -> str:
    """A whole document.

    Args:
        text: the same as plain text, for readers without scripts or sight; all there is without a payload.
        picture: an SVG, shown where no script runs.
        payload: what `viewer.js` draws.
    """
    body, script = preformatted(text), ""
    if payload is not None:
        figure = _figure(title, picture) if picture else ""
        body = (
            f'<div id="view"></div>\n<noscript>{figure}</noscript>\n'
            f'<script type="application/json" id="payload">{json_for_script(payload)}</script>\n'
            f'<details class="ddt-twin"><summary>As text</summary>{body}</details>'
        )
        script = f'<script type="module">{script_text()}{_START}</script>'
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title>
<style>{asset("viewer.css")}</style></head>
<body>
<main>
{body}
</main>
{script}
</body></html>
"""


def frame(document: str, title: str, picture: str, text: str) -> str:
    """A notebook output with a page in it.

    Hosts that take frames and scripts out of outputs (an untrusted notebook, GitHub) leave the picture and the text
    below; where the page runs, `host.js` hides them.

    Args:
        document: from `page`.
        picture: an SVG.
    """
    label = html.escape(title)
    return (
        f'<iframe class="ddtree-lab-frame" sandbox="allow-scripts" title="{label}" srcdoc="{html.escape(document)}" '
        f'style="width:100%;height:{FRAME_HEIGHT}px;border:0"></iframe>'
        f'<details class="ddtree-lab-still" open><summary>{label}: picture and text</summary>'
        f"{_figure(title, picture)}{preformatted(text)}</details>"
        f"<script>{asset('host.js')}</script>"
    )


def still(title: str, picture: str, text: str) -> str:
    """A notebook output that runs nothing: the picture, drawn for a light page, and its text folded away."""
    figure = _figure(title, picture, "background:#fff")
    return f"{figure}<details><summary>As text</summary>{preformatted(text)}</details>"


def _figure(title: str, picture: str, style: str = "") -> str:
    return f'<figure role="img" aria-label="{html.escape(title)}" style="margin:0;{style}">{picture}</figure>'


def json_for_script(payload: dict[str, Any]) -> str:
    r"""JSON that can stand inside a script element.

    >>> json_for_script({"text": "</script>"})
    '{"text":"\\u003c/script>"}'
    """
    text = json.dumps(payload, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def preformatted(text: str) -> str:
    """A text that keeps its lines."""
    style = "line-height:1.2;font-family:monospace;white-space:pre;overflow-x:auto"
    return f'<pre tabindex="0" style="{style}">{html.escape(text)}</pre>'


@cache
def script_text() -> str:
    """The browser code as one module: the files of `order.json` without their imports of each other."""
    names = json.loads(asset("order.json"))
    return "".join(_IMPORTS.sub("", asset(name)) for name in names)


@cache
def asset(name: str) -> str:
    return (resources.files("ddtree_lab.view") / "static" / name).read_text(encoding="utf-8")
