"""Stage 7: the model card, its tables filled from the measurements and the training logs.

python -m assets.training.model_card
"""

import json
from pathlib import Path
from string import Template

from safetensors import safe_open

from . import train_drafter, train_target
from .evaluate import METHODS
from .rollouts import Rollouts
from .settings import (
    DRAFTER_TRAINING,
    EVALUATION,
    MEASUREMENTS_FILE,
    PACKAGE,
    PAIR,
    ROLLOUT_SAMPLING,
    SEEDS,
    SEQUENCE_LENGTH,
    TARGET_TRAINING,
)
from .tasks import KINDS

TEMPLATE = PACKAGE / "model_card.md"


def write_model_card() -> None:
    measurements = json.loads(MEASUREMENTS_FILE.read_text(encoding="utf-8"))
    groups = measurements["acceptance"]
    target_log, drafter_log = (_last_line(module.LOG) for module in (train_target, train_drafter))
    rollouts = Rollouts.load()
    target_tokens = TARGET_TRAINING.num_steps * TARGET_TRAINING.batch_size * SEQUENCE_LENGTH
    values = {
        "target_parameters": _millions(PAIR / "target"),
        "drafter_parameters": _millions(PAIR / "drafter"),
        "target_steps": TARGET_TRAINING.num_steps,
        "target_tokens": f"{target_tokens / 1e6:.1f}",
        "target_minutes": round(_minutes(train_target.LOG)),
        "chat_share_early": f"{TARGET_TRAINING.chat_share_early:.0%}",
        "chat_share_late": f"{TARGET_TRAINING.chat_share_late:.0%}",
        "chat_loss": target_log["chat"],
        "document_loss": target_log["documents"],
        "learning_rate": TARGET_TRAINING.learning_rate,
        "drafter_steps": DRAFTER_TRAINING.num_steps,
        "drafter_minutes": round(_minutes(train_drafter.LOG)),
        "drafter_loss": drafter_log["loss"],
        "drafter_batch_size": DRAFTER_TRAINING.batch_size,
        "anchors": DRAFTER_TRAINING.anchors_per_sequence,
        "drafter_learning_rate": DRAFTER_TRAINING.learning_rate,
        "num_rollouts": f"{int((~rollouts.is_validation).sum()):,}",
        "rollout_tokens": f"{rollouts.lengths[~rollouts.is_validation].sum() / 1e6:.1f}",
        "chat_temperatures": " and ".join(f"{value:g}" for value in ROLLOUT_SAMPLING.chat_temperatures),
        "document_temperatures": " and ".join(
            f"{value:g}" for value in sorted(set(ROLLOUT_SAMPLING.document_temperatures))
        ),
        "num_whole_epochs": DRAFTER_TRAINING.num_whole_epochs,
        "late_document_share": f"{DRAFTER_TRAINING.late_document_share:.0%}",
        "seeds": ", ".join(f"{name.replace('_', ' ')} {seed}" for name, seed in vars(SEEDS).items()),
        "max_new_tokens": EVALUATION.max_new_tokens,
        "prompts": sum(group["prompts"] for group in groups),
        "identical": sum(group["prompts_decoded_identically"] for group in groups),
        "acceptance_table": _acceptance_table(groups),
        "accuracy_table": _accuracy_table(measurements["task_accuracy"]),
    }
    card = Template(TEMPLATE.read_text(encoding="utf-8")).substitute(values)
    (PAIR / "README.md").write_text(card, encoding="utf-8")


def _acceptance_table(groups: list[dict]) -> str:
    names = [*METHODS, "n-gram look-up"]
    lines = [
        "| text | temperature | prompts | " + " | ".join(names) + " | distinct-4 |",
        "|---" * (len(names) + 4) + "|",
    ]
    for group in groups:
        cells = []
        for name in names:
            value = group["emitted_tokens_a_round"][name]
            cells.append(f"{value['mean']:.2f} [{value['low']:.2f}, {value['high']:.2f}]")
        start = f"| {group['domain']} | {group['temperature']:g} | {group['prompts']} | "
        lines.append(start + " | ".join(cells) + f" | {group['distinct_4']:.2f} |")
    return "\n".join(lines)


def _accuracy_table(accuracy: dict[str, dict[str, int]]) -> str:
    lines = ["| kind | right | of |", "|---|---|---|"]
    lines += [
        f"| {kind.replace('_', ' ')} | {accuracy[kind]['right']} | {accuracy[kind]['of']} |" for kind in KINDS
    ]
    right, of = (sum(count[key] for count in accuracy.values()) for key in ("right", "of"))
    return "\n".join([*lines, f"| **all** | **{right}** | **{of}** |"])


def _last_line(log: Path) -> dict:
    return json.loads(log.read_text(encoding="utf-8").splitlines()[-1])


def _minutes(log: Path) -> float:
    """Training time: a resumed run starts its clock again, so runs are added up."""
    seconds = [json.loads(line)["seconds"] for line in log.read_text(encoding="utf-8").splitlines()]
    ends = [now for now, after in zip(seconds, [*seconds[1:], 0.0], strict=True) if after < now]
    return sum(ends) / 60


def _millions(folder: Path) -> str:
    with safe_open(folder / "model.safetensors", framework="np") as weights:
        count = sum(int(weights.get_tensor(name).size) for name in weights.keys())  # noqa: SIM118 (not a dict)
    return f"{count / 1e6:.2f}"


if __name__ == "__main__":
    write_model_card()
