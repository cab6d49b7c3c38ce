"""The proof: every known bug made on purpose and diagnosed, and ports without a bug on every kind of target.

python -m ddtree_lab.doctor.matrix > docs/doctor.md
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from ddtree_lab.doctor.bugs import BUGS, Bug, BuggyPort
from ddtree_lab.doctor.checks import CHECKS
from ddtree_lab.doctor.diagnose import examine, material_for
from ddtree_lab.doctor.material import Material
from ddtree_lab.doctor.report import Report
from ddtree_lab.doctor.targets import CONFIGS, small_pair, with_large_fusion
from ddtree_lab.loading import load_pair

PROMPT = [(17 * i * i + 5 * i + 3) % 89 + 6 for i in range(20)]
# These measure the drafter; they cannot name a bug, and take the most time.
DECISIVE = [name for name in CHECKS if name not in ("acceptance", "prompt_modes", "tap_offsets")]
PAIRS_OF_BUGS = (
    # of one stage
    ("siblings_visible", "positions_off_by_one"),
    ("newest_row_hidden", "positions_by_index"),
    ("conv_window_empty", "recurrence_by_index"),
    ("conv_by_index", "verify_writes_states"),
    ("state_not_rolled_back", "conv_not_rolled_back"),
    ("state_not_rolled_back", "kv_not_compacted"),
    ("tap_off_by_plus_one", "wrong_mask_id"),
    ("embedding_scaled", "draft_positions_off_by_one"),
    ("past_end_of_sequence", "temperature_lost"),
    # of two
    ("positions_by_index", "tap_off_by_plus_one"),
    ("siblings_visible", "conv_not_rolled_back"),
    ("recurrence_by_index", "length_overshot"),
    ("kv_not_compacted", "rejected_taps_kept"),
    ("conv_off_by_one", "states_leak_between_runs"),
)


@dataclass(frozen=True)
class Row:
    """One diagnosis of the matrix.

    Args:
        bugs: made on purpose.
        pair: where.
    """

    bugs: tuple[Bug, ...]
    pair: str
    report: Report = field(repr=False)

    @property
    def first_check(self) -> str:
        return self.report.problems[0].check if self.report.problems else "none"

    @property
    def is_named(self) -> bool:
        """Each bug is named, no other is, and nothing is left without a cause."""
        return all(finding.bugs for finding in self.report.problems) and set(self.report.bugs) == {
            bug.name for bug in self.bugs
        }

    @property
    def is_located(self) -> bool:
        """The top finding has the right stage, layers of the right kind, and the bug's own cause."""
        if not self.report.problems:
            return False
        top = self.report.problems[0]
        bug = next((bug for bug in self.bugs if bug.name in top.bugs), None)
        if bug is None:
            return False
        kinds = {self.report.kinds[i] for i in top.layers}
        return (
            top.stage == bug.stage and bug.cause in top.cause and (not bug.layer_kind or kinds == {bug.layer_kind})
        )  # fmt: skip

    @property
    def ok(self) -> bool:
        return self.is_named and self.is_located

    def to_dict(self) -> dict[str, Any]:
        return {
            "bugs": [bug.name for bug in self.bugs],
            "pair": self.pair,
            "first_check": self.first_check,
            "is_named": self.is_named,
            "is_located": self.is_located,
            "num_problems": len(self.report.problems),
            "verdict": self.report.verdict,
            "skipped": [finding.check for finding in self.report.findings if finding.status == "skipped"],
            "text": self.report.to_text(),
        }


class Matrix:
    """Material of the pairs on which bugs are made, shared by all diagnoses."""

    @cached_property
    def small(self) -> Material:
        """Most bugs show on a random hybrid of four layers, and quickly."""
        return Material(small_pair("hybrid"), PROMPT)

    @cached_property
    def large_fusion(self) -> Material:
        return Material(with_large_fusion(small_pair("hybrid")), PROMPT)

    @cached_property
    def scaled(self) -> Material:
        return Material(small_pair("scaled embedding"), PROMPT)

    @cached_property
    def embedded(self) -> Material:
        """A walk goes wrong only where drafts are accepted, and that takes a trained drafter."""
        return material_for(load_pair())

    def material(self, bugs: Sequence[Bug]) -> Material:
        """The smallest pair on which these bugs can be made and seen."""
        if any(bug.stage == "walk" for bug in bugs):
            return self.embedded
        able = (
            material
            for material in (self.small, self.large_fusion, self.scaled, self.embedded)
            if not any(bug.hindrance(material.pair) for bug in bugs)
        )
        return next(able)

    def diagnose(self, *names: str) -> Row:
        """Make these bugs and have them diagnosed."""
        bugs = tuple(BUGS[name] for name in names)
        material = self.material(bugs)
        return Row(bugs, material.pair.name, examine(material, BuggyPort(material.pair, bugs), DECISIVE))

    def all_bugs(self) -> Iterator[Row]:
        return (self.diagnose(name) for name in BUGS)

    def all_pairs_of_bugs(self) -> Iterator[Row]:
        return (self.diagnose(*names) for names in PAIRS_OF_BUGS)


CLEAN = [(kind, dtype) for kind in CONFIGS for dtype in (torch.float32, torch.bfloat16)]
# Random targets whose logits one rounding may move by a good part of their size.
SENSITIVE = ("Qwen3-Next", "hybrid, mixture of experts", "hybrid in a multimodal wrapper")
SENSITIVE_BUGS = (
    "flattened_recurrence", "state_not_rolled_back", "siblings_visible", "positions_by_index", "conv_by_index",
)  # fmt: skip


def diagnose_clean(kind: str, dtype: torch.dtype) -> Row:
    """The built-in port on a tiny random target of a kind, all checks."""
    pair = small_pair(kind, dtype)
    return Row((), pair.name, examine(Material(pair, PROMPT)))


def diagnose_embedded(dtype: torch.dtype) -> Row:
    """The built-in port on the embedded pair, in a dtype."""
    pair = load_pair()
    material = material_for(pair)
    pair.target.to(dtype)
    pair.drafter.to(dtype)  # type: ignore[attr-defined]
    return Row((), f"embedded, {str(dtype).removeprefix('torch.')}", examine(material))


def diagnose_sensitive(kind: str) -> Iterator[Row]:
    """Bugs on a target of a kind in bfloat16."""
    pair = small_pair(kind, torch.bfloat16)
    material = Material(pair, PROMPT)
    for name in SENSITIVE_BUGS:
        port = BuggyPort(pair, [BUGS[name]])
        yield Row((BUGS[name],), pair.name, examine(material, port, DECISIVE))


def everything() -> dict[str, list[Row]]:
    """All of the proof, by section."""
    matrix = Matrix()
    return {
        "clean": [diagnose_clean(kind, dtype) for kind, dtype in CLEAN]
        + [diagnose_embedded(dtype) for dtype in (torch.float32, torch.bfloat16)],
        "bugs": list(matrix.all_bugs()),
        "pairs": list(matrix.all_pairs_of_bugs()),
        "sensitive": [row for kind in SENSITIVE for row in diagnose_sensitive(kind)],
    }


def main(arguments: Sequence[str]) -> None:
    """Print docs/doctor.md, or with `--json` what it is made of; every number comes from this run."""
    from ddtree_lab.doctor.document import document

    rows = everything()
    if "--json" in arguments:
        json.dump({section: [row.to_dict() for row in found] for section, found in rows.items()}, sys.stdout)
    else:
        sys.stdout.write(document(**rows))


if __name__ == "__main__":
    main(sys.argv[1:])
