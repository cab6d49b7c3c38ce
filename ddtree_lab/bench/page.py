"""`docs/performance.md`, written from the rows of a folder: no measured figure comes from anywhere else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ddtree_lab.bench.decodes import decode_rows
from ddtree_lab.bench.goals import GOALS
from ddtree_lab.bench.growth import exponent
from ddtree_lab.bench.plots import plot_sweep, plot_verify
from ddtree_lab.bench.rows import KEY_OF_MICRO, Row, keyed, read_rows
from ddtree_lab.bench.sweep import KEY, judged, read_sweep
from ddtree_lab.bench.tables import Table, goals_table, milliseconds, ratio, sweep_table
from ddtree_lab.records import format_bytes
from ddtree_lab.trace import write_atomically

PAGE = Path("docs/performance.md")

INTRODUCTION = """# Performance

Written by `ddtree-lab bench page` from a run; `make bench` runs everything again. Times are medians with quartiles.
Ratios are between neighbours: the calls are timed in turns in one process, so what slows the machine slows both."""

BOUNDS = """*Bound* is what no value could be better than: for a verify pass the *linear layers*, which every pass
over its rows runs; for decodes the speed-up if a round took no longer than its draft and its verify pass.
Two runs differ by some three per cent, so a value that close to its limit may be on the other side of it next time.

* *Builder after top-k*: what is left there is the heap itself, a microsecond or so a node in Python, and a tenth of it
  is less than an interpreted loop can do. Level by level in numpy, some 15 array calls a level, was slower than the
  heap on distributions like a drafter's. Compiled by numba (`pip install 'ddtree-lab[fast]'`) it is reached. Importing
  numba and loading what it compiled costs half a second a process, compiling it some five once a machine, so it is
  asked for after 400,000 nodes: 400 trees of 1,024, or 12,500 of 32. Sorting the vocabulary costs several
  times as much as the heap, so that is what was made smaller: 64 ranks are tried first, by blocks.
* *Verify of large trees*: from some 300 nodes on most pairs of nodes are of two branches, and the recurrence is run
  level by level, without them (`recurrent/levels.py`).
* *Commit*: recurrent layers of one shape are committed at once; what is left are the checks, and a few calls a layer.
* *Round without verify*: most of it is the drafter, its pass over the block (*draft*) and its keys and values of the
  committed rows (nearly half of *commit*). On so small a pair that is calls and not computation, and they find the
  processor's caches full of the verify pass: run once more at once, *draft* takes two thirds of its time, *tree* a
  third and *mask* a fifth. So it pays to call less, and to touch less. In turns with the code before, at budget 32:
  norms in fewer calls took a point off the share, all layers' keys and values of committed rows in one product 0.6,
  rotations cut from a table 0.5. One parameter for a layer's queries, keys and values brought 0.2 and is not built; the
  published tensors stay the parameters. The quicker the verify pass, the larger the share of the rest.
* *Auto* also decodes plainly where nothing pays, so on hard text it can be ahead of every fixed choice."""


def write_page(folder: str | Path, page: Path = PAGE) -> Path:
    """Write the page and its plots.

    Raises:
        ValueError: no rows of stages in the folder.
    """
    folder = Path(folder)
    micro = list(keyed(reversed(read_rows(*sorted(folder.glob("micro*.jsonl")))), KEY_OF_MICRO).values())[
        ::-1
    ]
    if not micro:
        raise ValueError(
            f"--out {folder} has no micro.jsonl; run `ddtree-lab bench micro --out {folder}` first."
        )
    sweep = judged(list(keyed(read_sweep(folder / "sweep"), KEY).values()))
    parts = [
        INTRODUCTION,
        _machine(micro[-1]["environment"]),
        "## Goals",
        goals_table([*micro, *decode_rows(sweep)], GOALS).markdown(),
        BOUNDS,
    ]
    parts += ["## Verify", _verify_table(micro).markdown()]
    parts += _picture(plot_verify(micro, folder), page, "A verify pass by method and number of nodes")
    parts += ["## How it grows", growth_table(micro).markdown()]
    parts += ["## Other stages", _stages_table(micro).markdown()]
    if sweep:
        parts += ["## End to end", SWEEP_TEXT, sweep_table(sweep).markdown()]
        parts += _picture(plot_sweep(sweep, folder), page, "Speed-up and emitted tokens a round")
    for advice in read_rows(folder / "advice.jsonl"):
        parts += [
            f"## Advice: {advice['domain']}, temperature {advice['temperature']:g}",
            _advice_table(advice).markdown(),
        ]
        parts += [advice["advice"] + "."]
    for soak in read_rows(folder / "soak.jsonl")[-1:]:
        parts += ["## Soak", _soak(soak)]
    page.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(page, "\n\n".join(parts) + "\n")
    return page


SWEEP_TEXT = """Embedded pair, 100 new tokens, held-out prompts; speed-up over the library's own `generate`.
*Emitted* is tokens a round, *drafted* nodes a round; *lossless* compares tokens with plain decoding's."""


def _machine(environment: Row) -> str:
    e = environment
    return (
        f"Machine: {e['processor']}, {e['cores']} cores, {e['memory_gib']} GiB, {', '.join(e['devices'])}; "
        f"{e['num_threads']} thread; PyTorch {e['torch']}, transformers {e['transformers']}, Python {e['python']}."
    )


def _verify_table(rows: Sequence[Row]) -> Table:
    lines = [
        (
            str(r["subject"]),
            str(r["nodes"]),
            r["case"],
            milliseconds(r),
            ratio(r),
            format_bytes(r["peak_bytes"]),
        )
        for r in rows
        if r["bench"] == "verify"
    ]
    return Table("verify", ("target", "nodes", "method", "ms", "ratio to plain", "peak memory"), tuple(lines))


def growth_table(rows: Sequence[Row]) -> Table:
    """Time and memory at the ends of each axis, and the fitted exponents."""
    lines = []
    grown = [row for row in rows if row["bench"] == "growth"]
    for axis in dict.fromkeys(row["case"] for row in grown):
        points = sorted((row for row in grown if row["case"] == axis), key=lambda row: row["value"])
        values = [row["value"] for row in points]
        fits = [exponent(values, [row[name] for row in points]) for name in ("seconds", "peak_bytes")]
        ends = [
            f"{1e3 * row['seconds']:.3g} ms, {format_bytes(row['peak_bytes'])}"
            for row in (points[0], points[-1])
        ]
        lines.append((axis, f"{values[0]:,} … {values[-1]:,}", *ends, *(f"{fit:.2f}" for fit in fits)))
    columns = ("against", "from … to", "at the first", "at the last", "exponent of time", "of memory")
    return Table("growth: exponents over the upper half", columns, tuple(lines))


def _stages_table(rows: Sequence[Row]) -> Table:
    lines = [
        (
            r["bench"], ", ".join(str(r[name]) for name in ("case", "part", "subject") if name in r),
            str(r.get("nodes", r.get("budget", ""))), milliseconds(r), ratio(r), r.get("ratio_to", ""),
        )
        for r in rows
        if r["bench"] not in ("verify", "growth")
    ]  # fmt: skip
    return Table("stages", ("stage", "what", "nodes or budget", "ms", "ratio", "to"), tuple(lines))


def _advice_table(row: Row) -> Table:
    lines = [
        (
            c["label"] + (" ◆" if c["label"] == row["best"] else ""), f"{c['emitted']:.2f}", f"{c['speedup']:.2f}",
            "" if c["measured"] is None else f"{c['measured']:.2f}",
        )
        for c in row["choices"]
    ]  # fmt: skip
    columns = ("method", "emitted, foreseen", "speed-up over plain decoding, foreseen", "measured")
    return Table("advice", columns, tuple(lines))


def _soak(row: Row) -> str:
    tensors, resident = (
        " → ".join(format_bytes(value) for value in row[name]) for name in ("tensor_bytes", "resident_bytes")
    )
    return (
        f"{row['num_rounds']:,} rounds in {row['num_decodes']:,} decodes over mixed prompts, budgets and temperatures: "
        f"{row['num_wrong']} not lossless. From a tenth of the way to the end: tensors {tensors}, process {resident}."
    )


def _picture(plot: Path | None, page: Path, words: str) -> list[str]:
    if plot is None:
        return []
    figures = page.parent / "figures"
    figures.mkdir(parents=True, exist_ok=True)
    write_atomically(figures / plot.name, plot.read_bytes())
    return [f"![{words}](figures/{plot.name})"]
