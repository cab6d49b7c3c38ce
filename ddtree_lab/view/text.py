"""A round in the terminal: the tree with what was kept, what was not, and what came instead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text
from rich.tree import Tree

from ddtree_lab.view.marks import MARKS
from ddtree_lab.view.numbers import (
    Row,
    is_forced,
    most_interesting,
    probability,
    shown_nodes,
    step_log_prob,
    title,
)
from ddtree_lab.view.tokens import SPACE

if TYPE_CHECKING:
    from rich.table import Table

# Shown whole up to this many nodes; in larger trees unlikely rejected branches are folded.
MAX_NODES = 40
MAX_ROUNDS = 40  # of a whole trace as text


def draw_round(round_: Row, max_nodes: int | None = MAX_NODES) -> Tree:
    """The tree of a round.

    Every drafted token has its draft probability at its depth (the drafter's marginal) and, where it was recorded,
    the target's probability of it. ✓ marks the accepted path, ★ the bonus token: the target's own, where the tree had
    no such child.

    Args:
        round_: of a payload.
        max_nodes: the least likely nodes beyond are counted, not shown; None shows all.
    """
    shown = shown_nodes(round_, max_nodes)
    branches = {0: Tree(_root(round_), guide_style="dim")}
    for node in shown[1:]:
        branches[node] = branches[round_["parents"][node]].add(_label(round_, node))
    for node, count in _hidden(round_, branches).items():
        branches[node].add(Text(f"… {count} unlikely nodes, none accepted", "dim"))
    if round_["bonus"] is not None:
        last = round_["path"][-1]
        branches[last].add(_bonus(round_, last))
    return branches[0]


def _root(round_: Row) -> Text:
    mark = MARKS["root"]
    root = Text(f"{mark.glyph} {round_['texts'][0]}", mark.style, no_wrap=True)
    return root.append(f"  anchor, position {round_['past_length']}", "not bold dim")


def _label(round_: Row, node: int) -> Text:
    mark = MARKS[round_["states"][node]]
    label = Text(f"{mark.glyph} {round_['texts'][node]}", mark.style, no_wrap=True)
    step = step_log_prob(round_, node)
    if step is not None:
        label.append(f"  p {probability(step)}", "not bold dim")
    own = (round_["token_target_log_probs"] or {node: None})[node]
    if own is not None:
        label.append(f"  target {probability(own)}", "not bold dim")
    if is_forced(round_, node):
        label.append("  forced", "not bold dim")
    return label


def _bonus(round_: Row, last: int) -> Text:
    mark = MARKS["bonus"]
    label = Text(f"{mark.glyph} {round_['bonus']['text']}", mark.style, no_wrap=True)
    label.append("  bonus", "not bold dim")
    sure = round_["target_log_probs"][last]
    return label if sure is None else label.append(f", target {probability(sure)}", "not bold dim")


def _hidden(round_: Row, branches: dict[int, Tree]) -> dict[int, int]:
    """How many nodes are folded below each one that is shown."""
    hidden: dict[int, int] = {}
    below: dict[int, int] = {}  # folded node → the shown one above it
    for node in range(1, len(round_["ids"])):
        if node not in branches:
            parent = round_["parents"][node]
            below[node] = below.get(parent, parent)
            hidden[below[node]] = hidden.get(below[node], 0) + 1
    return hidden


def draw_trace(payload: dict[str, Any], only: int | None = None, max_nodes: int | None = MAX_NODES) -> Group:
    """Settings, prompt, and the trees of the rounds.

    Args:
        payload: of kind `"trace"`.
        only: index of the one round to draw; where not given, all up to `MAX_ROUNDS`.
    """
    parts = list(_head(payload))
    chosen = range(len(payload["rounds"]))[:MAX_ROUNDS] if only is None else [only]
    for i in chosen:
        parts += [Text(), *_titled(payload, i, max_nodes)]
    left = payload["num_rounds"] - len(chosen)
    if only is None and left:
        parts += [Text(), Text(f"… {left} further rounds", "dim")]
    return Group(*parts)


def draw_overview(payload: dict[str, Any]) -> Group:
    """Settings, prompt and text, a line a round, and the tree of the round that shows most."""
    parts = [*_head(payload), Text(), draw_rounds_table(payload)]
    if payload["rounds"]:
        parts += [Text(), *_titled(payload, most_interesting(payload["rounds"]), MAX_NODES)]
    return Group(
        *parts, Text(), Text("show --round N draws another one; export --html FILE draws all", "dim")
    )


def _head(payload: dict[str, Any]) -> Iterator[RenderableType]:
    yield Text(payload["title"], "bold")
    if payload["settings"]:
        yield Text(_settings(payload), "dim")
    if payload["first"]["ids"]:
        yield from (Text(), Text.assemble(("prompt  ", "dim"), running(payload["prompt"]["texts"])))
        yield Text.assemble(("text    ", "dim"), _said(payload))


def _titled(payload: dict[str, Any], index: int, max_nodes: int | None) -> Iterator[RenderableType]:
    round_ = payload["rounds"][index]
    yield Text(title(round_, payload["round_numbers"][index] + 1, payload["num_rounds"]), "bold")
    yield draw_round(round_, max_nodes)
    yield from _seconds(round_)


def _settings(payload: dict[str, Any]) -> str:
    said = [f"{name} {value}" for name, value in payload["settings"].items() if value is not None]
    return ", ".join(said)


def _said(payload: dict[str, Any]) -> Text:
    """The new text, kept drafts plain and the target's own tokens in the bonus mark's style."""
    own = MARKS["bonus"].style
    said = Text(running(payload["first"]["texts"]), own)
    for round_ in payload["rounds"]:
        texts = round_["emitted_texts"]
        drafts = len(texts) - (round_["bonus"] is not None)
        said.append(running(texts[:drafts]), "not bold default").append(running(texts[drafts:]), own)
    return said


def running(texts: list[str]) -> str:
    """Tokens as running text, whose spaces need no mark."""
    return "".join(texts).replace(SPACE, " ")


def _seconds(round_: Row) -> Iterator[Text]:
    if round_["stage_seconds"]:
        times = (f"{stage} {seconds * 1e3:.1f}" for stage, seconds in round_["stage_seconds"].items())
        yield Text(f"ms: {', '.join(times)}", "dim")


def draw_rounds_table(payload: dict[str, Any]) -> Table:
    """One line a round: what was drafted, kept and emitted."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("round", "drafted", "accepted\ndrafts", "emitted\ntokens"):
        table.add_column(name, justify="right", min_width=max(map(len, name.split("\n"))))
    table.add_column("text (★ the target's own)", no_wrap=True)
    for index, round_ in zip(payload["round_numbers"], payload["rounds"], strict=True):
        texts = list(round_["emitted_texts"])
        if round_["bonus"] is not None:
            texts[-1] = f" ★{texts[-1]}"
        table.add_row(
            str(index + 1),
            str(len(round_["ids"]) - 1),
            str(round_["states"].count("accepted")),
            str(len(round_["emitted"])),
            Text("".join(texts), overflow="ellipsis", no_wrap=True),
        )
    return table


def draw_diff(payload: dict[str, Any], max_nodes: int | None = MAX_NODES) -> Group:
    """Where the second run leaves the first, what the target thought there, and both rounds."""
    found = payload["divergence"]
    names = [f"{side.upper()}  {_settings(payload[side])}" for side in "ab"]
    parts: list[RenderableType] = [
        Text(payload["title"], "bold"),
        *(Text(name, "dim") for name in names),
        Text(),
    ]
    if found is None:
        count = len(payload["a"]["first"]["ids"]) + sum(len(r["emitted"]) for r in payload["a"]["rounds"])
        return Group(*parts, Text(f"✓ both runs say the same {count} tokens", "bold green"))
    parts.append(Text(divergence_title(found), "bold"))
    parts += [Text.assemble((f"{side.upper()} ", "dim"), _best(found[side])) for side in "ab"]
    if found["gap"] is not None:
        parts.append(Text(f"gap of the first two choices: {found['gap']:.3f} nats", "dim"))
    for side in "ab":
        number, trace = found[f"round_{side}"], payload[side]
        if number is not None:
            name = title(trace["rounds"][number], number + 1, trace["num_rounds"])
            parts += [
                Text(),
                Text(f"{side.upper()}  {name}", "bold"),
                draw_round(trace["rounds"][number], max_nodes),
            ]
    return Group(*parts)


def divergence_title(found: dict[str, Any]) -> str:
    """`new token 17 differs: A says ␣cat, B says ␣dog`."""
    said = [f"{side.upper()} says {found[side]['text']}" for side in "ab"]
    ended = [side for side in "ab" if found[side]["id"] is None]
    if ended:
        (other,) = set("ab") - set(ended)
        return f"{ended[0].upper()} ends before new token {found['index']}, where {other.upper()} goes on"
    return f"new token {found['index']} differs: {said[0]}, {said[1]}"


def _best(side: dict[str, Any]) -> str:
    if side["id"] is None:
        return side["text"]
    if not side["top"]:
        return f"{side['text']}  (the target's best tokens were not recorded here)"
    return f"{side['text']}  of  " + "  ".join(
        f"{text} {probability(value)}" for _, text, value in side["top"]
    )


def shown_round(payload: dict[str, Any], round_: int | None) -> int:
    """The index among a payload's rounds of the one asked for, the most interesting one where none is.

    Raises:
        ValueError: there is no such round.
    """
    numbers = payload["round_numbers"]
    if not numbers:
        raise ValueError("the trace has no round; its text ended with the token of the prefill.")
    if round_ is None:
        return most_interesting(payload["rounds"])
    if round_ not in numbers:
        raise ValueError(f"round is {round_}; the trace has rounds 0 to {payload['num_rounds'] - 1}.")
    return numbers.index(round_)
