"""Makes the notebooks from their sources: `NN_name.py` is run from top to bottom and becomes `NN_name.ipynb`.

    python notebooks/build.py            # all of them
    python notebooks/build.py 01 04      # these
    python notebooks/build.py --check    # nothing is run: are the pairs in step, and their outputs clean?

A notebook is run as a reader would run it, but offline, on one thread and with fixed dates, so that a second run
gives the same file. Cells whose output differs from one machine to the next (durations, rounding) have the tag
`varies`: `# %% tags=["varies"]`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent
VARIES = "varies"
CELL_SECONDS = 120
MAX_BYTES = 1_500_000
MAX_COLUMNS = 100  # a longer line is broken inside a word
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    "PYTHONPATH": str(ROOT),
    "SOURCE_DATE_EPOCH": "0",  # the date that matplotlib writes into its pictures
    # Whatever asks for the network all the same meets a closed door.
    **dict.fromkeys(
        ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY"),
        "http://127.0.0.1:9",
    ),
    "no_proxy": "",
}
# Durations as records write them: in a payload, under a round, beside a text.
_DURATIONS = re.compile(
    r"""(&quot;|")(?:stage_)?seconds\1:\s*(?:\{[^}]*\}|[\d.e+-]+|null)|^ms: .*?(?=$|<|&lt;)|[\d.,]+ tokens/s""",
    re.MULTILINE,
)


def sources() -> list[Path]:
    """The numbered sources, in order."""
    return sorted(FOLDER.glob("[0-9][0-9]_*.py"))


def read_source(path: Path) -> NotebookNode:
    """A source as a notebook that has not been run; its cell ids follow from the texts of the cells."""
    notebook = jupytext.read(path)
    seen: dict[str, int] = {}
    for cell in notebook.cells:
        digest = hashlib.sha1(cell.source.encode()).hexdigest()[:8]
        seen[digest] = seen.get(digest, 0) + 1
        cell.id = digest if seen[digest] == 1 else f"{digest}-{seen[digest]}"
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {
            "file_extension": ".py",
            "name": "python",
            "pygments_lexer": "ipython3",
        },
        "execution": {"timeout": CELL_SECONDS},  # read by `pytest --nbmake`
    }
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    return notebook


def run(notebook: NotebookNode) -> NotebookNode:
    """Run every cell in a new kernel.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised.
    """
    language = notebook.metadata["language_info"]
    with tempfile.TemporaryDirectory() as settings:
        client = NotebookClient(
            notebook,
            timeout=CELL_SECONDS,
            kernel_name="python3",
            resources={"metadata": {"path": str(FOLDER)}},
            record_timing=False,
            store_widget_state=False,
        )
        client.execute(env={**os.environ, **ENVIRONMENT, "IPYTHONDIR": settings})
    notebook.metadata["language_info"] = language  # without the version of this Python
    return tidy(notebook)


def tidy(notebook: NotebookNode) -> NotebookNode:
    """Outputs without what differs by chance and what is there twice."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [_tidy(output) for output in _joined(cell.outputs)]
    return notebook


def _joined(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """Outputs with the pieces of one stream, cut by chance, in one piece."""
    joined: list[NotebookNode] = []
    for output in outputs:
        if (
            joined
            and output.output_type == "stream" == joined[-1].output_type
            and output.name == joined[-1].name
        ):
            joined[-1].text += output.text
        else:
            joined.append(output)
    return joined


def _tidy(output: NotebookNode) -> NotebookNode:
    data = output.get("data", {})
    if "text/html" in data:
        data.pop("image/svg+xml", None)  # the HTML has the picture in it, with its description
    if "text/plain" in data:
        data["text/plain"] = _without_trailing_blanks(data["text/plain"])
    if "text" in output:
        output.text = _without_trailing_blanks(output.text)
    return output


def _without_trailing_blanks(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.split("\n"))


def faults(notebook: NotebookNode) -> list[str]:
    """What a committed notebook must not have, one line each."""
    found = []
    if "widgets" in notebook.metadata:
        found.append(
            "metadata.widgets: a widget's state was kept; show its view, not the widget"
        )
    if len(nbformat.writes(notebook)) > MAX_BYTES:
        found.append(f"over {MAX_BYTES:,} bytes: show smaller views")
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    if [cell.execution_count for cell in code] != [*range(1, len(code) + 1)]:
        found.append("not run from top to bottom")
    places = sorted(
        {
            str(ROOT),
            str(Path.home()),
            sys.prefix,
            tempfile.gettempdir(),
            "/home/",
            "site-packages",
        }
    )
    for cell in code:
        for output in cell.outputs:
            text = json.dumps(output)
            found += [
                f"cell {cell.execution_count}: a place of this machine ({p})"
                for p in places
                if p in text
            ]
            if "Traceback" in text or output.output_type == "error":
                found.append(f"cell {cell.execution_count}: a traceback")
            longest = max(map(len, output.get("text", "").split("\n")))
            if longest > MAX_COLUMNS:
                found.append(
                    f"cell {cell.execution_count}: a line of {longest} characters; wrap it with textwrap.fill"
                )
            if output.get("name") == "stderr":
                found.append(f"cell {cell.execution_count}: stderr: {output.text[:200]}")
            if (
                any(m.startswith("image/") for m in output.get("data", {}))
                and "text/html" not in output.data
            ):
                found.append(
                    f"cell {cell.execution_count}: a picture without a description; show it with dl.chart"
                )
            if "application/vnd.jupyter.widget-view+json" in output.get("data", {}):
                found.append(
                    f"cell {cell.execution_count}: a widget, which a reopened notebook cannot show"
                )
    return found


def comparable(cell: NotebookNode) -> list[Any]:
    """A cell's outputs as two runs should agree on them: without durations, and nothing of a cell tagged `varies`."""
    if VARIES in cell.metadata.get("tags", ()):
        return []
    return [
        _without_durations(output.get("text") or dict(output.get("data", {})))
        for output in cell.outputs
    ]


def _without_durations(content: Any) -> Any:
    if isinstance(content, dict):
        return {mime: _without_durations(value) for mime, value in content.items()}
    return _DURATIONS.sub("", content) if isinstance(content, str) else content


def in_step(path: Path) -> bool:
    """Whether the committed notebook has the cells of its source."""
    committed, source = nbformat.read(path.with_suffix(".ipynb"), 4), read_source(path)
    return [_content(cell) for cell in committed.cells] == [
        _content(cell) for cell in source.cells
    ]


def _content(cell: NotebookNode) -> tuple[str, str, tuple[str, ...]]:
    return cell.cell_type, cell.source, tuple(cell.metadata.get("tags", ()))


def build(path: Path) -> list[str]:
    """Run a source and write its notebook. Returns its faults."""
    notebook = run(read_source(path))
    nbformat.validate(notebook)
    target = path.with_suffix(".ipynb")
    nbformat.write(notebook, target)
    return faults(notebook)


def check(path: Path) -> list[str]:
    """Faults of a committed notebook; nothing is run."""
    target = path.with_suffix(".ipynb")
    if not target.exists():
        return ["there is no .ipynb yet"]
    return [
        *([] if in_step(path) else ["source and notebook differ"]),
        *faults(nbformat.read(target, 4)),
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "numbers", nargs="*", metavar="NN", help="numbers of notebooks; all where none is given"
    )
    parser.add_argument("--check", action="store_true", help="run nothing")
    options = parser.parse_args(arguments)
    chosen = [p for p in sources() if not options.numbers or p.name[:2] in options.numbers]
    if not chosen:
        parser.error(f"no source has a number among {' '.join(options.numbers)}")
    failed = False
    for path in chosen:
        began = time.perf_counter()
        found = check(path) if options.check else build(path)
        size = (
            path.with_suffix(".ipynb").stat().st_size
            if path.with_suffix(".ipynb").exists()
            else 0
        )
        print(
            f"{path.stem}: {time.perf_counter() - began:.0f} s, {size / 1e6:.2f} MB", flush=True
        )
        for fault in found:
            print(f"  {fault}", flush=True)
        failed = failed or bool(found)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
