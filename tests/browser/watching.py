"""What every browser test watches: requests that leave, errors on the page, accessibility."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from axe_playwright_python.sync_playwright import Axe

ROOT = Path(__file__).parent.parent.parent
PROMPT = "Which three numbers follow 11, 13, 15, 17? Then count from 3 to 12."
LOCAL = ("file:", "data:", "blob:", "about:", "chrome-extension:")


class Watch:
    """Everything a page asks the network for, and every error it reports."""

    def __init__(self, page: Any, allowed: str | None = None) -> None:
        self.external: list[str] = []
        self.errors: list[str] = []
        self._allowed = (*LOCAL, allowed, allowed.replace("http", "ws", 1)) if allowed else LOCAL
        page.on("request", self._request)
        page.on("websocket", self._request)
        page.on("pageerror", lambda fault: self.errors.append(str(fault)))
        page.on("console", lambda m: m.type == "error" and self.errors.append(f"{m.text} {m.location}"))

    def _request(self, request: Any) -> None:
        if not request.url.startswith(self._allowed):
            self.external.append(request.url)


def violations(frame: Any, inside: str | None = None) -> list[str]:
    """What axe-core finds wrong in a page or a frame, or inside an element of it, one line a finding."""
    found = Axe().run(frame, context=inside).response["violations"]
    return [f"{v['id']}: {v['help']}: {[n['html'][:160] for n in v['nodes'][:3]]}" for v in found]


def focused(frame: Any) -> str:
    """What has the keyboard there: a tree node's number, else the element's tag."""
    return frame.evaluate(
        "(document.activeElement?.dataset.node ?? document.activeElement?.tagName ?? '').toLowerCase()"
    )
