"""docs/doctor.md, written from the matrix's own output."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ddtree_lab.doctor.checks import CHECKS
from ddtree_lab.environment import version_of

if TYPE_CHECKING:
    from ddtree_lab.doctor.matrix import Row

INTRODUCTION = """# The port doctor

A loop that drafts and verifies runs, accepts 1.6 tokens a round, and nobody knows whether the drafter or the
port is to blame. `ddtree-lab doctor` (in Python `dl.diagnose`) examines a port stage by stage and answers: is it
exact, and if not, in which stage and layers, on what evidence, for what cause, and what to do; and how much of the
drafter's acceptance the port gets.

```console
ddtree-lab doctor                                       # the built-in port on the embedded pair
ddtree-lab doctor --port examples.my_port:MyPort        # yours: three methods are enough, see ddtree_lab.Port
ddtree-lab doctor --inject flattened_recurrence --html report.html    # what a known mistake looks like
ddtree-lab doctor --check masks --check rollback        # some checks only; --list-checks, --list-bugs
```

It exits 1 if it finds a problem, 0 if not, 2 on a usage error; `--json` prints the report as JSON.

## How to read a report

The first line is the verdict, with emitted tokens a round: what the port's loop gets, and what the drafter gets by
itself on clean target states along the target's own text, with a 95 % interval.

| verdict | meaning |
|---|---|
| `Neither: the port is exact: …` | nothing to find; what the port gets is what this drafter gives |
| `The drafter: the port is exact, and the drafter can do no more: …` | less than 2 on clean states: another drafter |
| `The port: verify in linear_attention layers … (flattened_recurrence): …` | stage, layers, and the known mistake |
| `Both, the port and a weak drafter: …` | mend the port first, then look at the drafter |

Then come the problems, each with what was seen, the cause, the fix, the numbers, and links to public reports of the
same kind; then all checks: `✗` problem, `✓` right, `·` worth knowing (also: follows from a problem above), `–` skipped,
with the reason.

**What is compared.** The truth is the slowest obvious method, one forward of a whole text without a cache. What
rounding explains is measured on the same text, not assumed: copies of it run as batch rows in which whatever enters
each layer is disturbed by one unit in the last place, and plain decoding token by token; four times the largest of
these differences is allowed. On a sensitive target in bfloat16 that says little about logits, so `layer_by_layer` and
the checks of the cache give every layer clean input and compare its own answer: no error, and no rounding, reaches the
next layer.

**How a cause is found.** When a check fails, each known mistake of the stages in question is made on purpose in the
built-in port, and the same calls are repeated. The mistake that gives the same numbers is named; two together are tried
where one is not enough. Later checks start from what is known, so what merely follows is a note. A problem that no
known mistake explains is still located: by stage, layers and nodes.

**Ports the hooks do not see.** `masks`, `positions`, `layer_by_layer` and others watch the target's own layers. A port
that runs paths as batch rows, or the prompt in pieces, is skipped there and examined through its answers alone. A
call that raises, returns NaN or the wrong number of rows, or does not return in time is a finding.
"""


CHECKS_TEXT = """## Checks

In the order in which they run; what is cheap comes first. Detectors are those of the log of public port bugs behind
the doctor (D1 rollback contract, D3 node against path, D6 masks, D9 taps, …). Forwards are the target's, the port's
own included, when nothing is wrong; what an earlier check has computed is not computed again, and `kv_rows`,
`conv_windows` and `recurrent_states` share theirs. A problem costs more, for known mistakes are tried.

"""


def document(
    bugs: Sequence[Row], pairs: Sequence[Row], sensitive: Sequence[Row], clean: Sequence[Row]
) -> str:
    """The page: text, checks, the matrix of bugs, pairs of bugs, bugs in half precision, clean ports."""
    parts = [
        INTRODUCTION,
        _checks(),
        _bugs(bugs),
        _pairs(pairs),
        _sensitive(sensitive),
        _clean(clean),
        _made(),
    ]
    return "\n".join(parts)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def _checks() -> str:
    rows = [
        (f"`{check.name}`", check.stage, check.question, " ".join(check.detectors), str(check.cost))
        for check in CHECKS.values()
    ]
    head = ("check", "stage", "question", "detectors", "forwards, about")
    return CHECKS_TEXT + _table(head, rows)


def _bugs(rows: Sequence[Row]) -> str:
    found = sum(row.ok for row in rows)
    table = [
        (
            f"`{row.bugs[0].name}`", row.bugs[0].stage, row.bugs[0].layer_kind or "–", f"`{row.first_check}`",
            _yes(row.is_located), _yes(row.is_named), row.pair, row.bugs[0].symptom,
        )
        for row in rows
    ]  # fmt: skip
    head = (
        "bug", "stage", "layers", "first check that sees it", "stage, layers and cause right",
        "named, and nothing else", "made on", "what one sees",
    )  # fmt: skip
    return (
        f"## Bugs\n\n{len(rows)} known mistakes, each made on purpose and diagnosed: {found} of {len(rows)} are found, "
        "located and named, with nothing left over.\n\n" + _table(head, table)
    )


def _pairs(rows: Sequence[Row]) -> str:
    table = [
        (
            " and ".join(f"`{bug.name}`" for bug in row.bugs),
            "one" if len({bug.stage for bug in row.bugs}) == 1 else "two",
            ", ".join(f"`{finding.check}`" for finding in row.report.problems),
            _yes(row.is_named),
        )
        for row in rows
    ]
    return "## Two bugs at once\n\n" + _table(("bugs", "stages", "checks that see them", "both named"), table)


def _sensitive(rows: Sequence[Row]) -> str:
    table = [
        (f"`{row.bugs[0].name}`", row.pair, f"`{row.first_check}`", _yes(row.is_located), _yes(row.is_named))
        for row in rows
    ]
    head = (
        "bug",
        "target",
        "first check that sees it",
        "stage, layers and cause right",
        "named, and nothing else",
    )
    return (
        "## In bfloat16, on targets that rounding moves far\n\nOn these random targets one rounding in each layer "
        "moves logits by a good part of their size, so that the\nlogits say little; masks, positions, layers and "
        "states say enough.\n\n" + _table(head, table)
    )


def _clean(rows: Sequence[Row]) -> str:
    table = [
        (
            row.pair,
            str(sum(finding.status == "ok" for finding in row.report.findings)),
            str(len(row.report.problems)),
            ", ".join(f"`{finding.check}`" for finding in row.report.findings if finding.status == "skipped")
            or "–",
        )
        for row in rows
    ]
    return "## Ports without a bug\n\nThe built-in port, all checks.\n\n" + _table(
        ("target", "checks right", "problems", "skipped"), table
    )


def _yes(is_so: bool) -> str:
    return "yes" if is_so else "**no**"


def _made() -> str:
    versions = ", ".join(f"{name} {version_of(name)}" for name in ("torch", "transformers"))
    return (
        f"Written by `python -m ddtree_lab.doctor.matrix > docs/doctor.md` with {versions}, Python "
        f"{platform.python_version()}, {platform.system()}, on the CPU.\n"
    )
