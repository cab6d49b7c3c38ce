"""Every number and path of the training in one place; the stages read them from here."""

from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
BUILD = PACKAGE / "build"  # checkpoints, token caches and logs; not part of the repository
PAIR = PACKAGE.parent / "embedded_pair"  # what ships

TOKENIZER_FOLDER = BUILD / "tokenizer"
TARGET_FOLDER = BUILD / "target"
DRAFTER_FOLDER = BUILD / "drafter"
ROLLOUTS_FILE = BUILD / "rollouts.npz"
MEASUREMENTS_FILE = PAIR / "measurements.json"

# Debian package python3.11-doc; the standard library is the running interpreter's own.
DOCUMENTATION = Path("/usr/share/doc/python3.11/html/_sources")

END_OF_TEXT, TURN_START, TURN_END, MASK = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END, MASK)
VOCABULARY_SIZE = 2048
SEQUENCE_LENGTH = 256


@dataclass(frozen=True)
class Seeds:
    """One seed a purpose, so that changing one stage leaves the others' draws alone."""

    vocabulary: int = 11
    chat_text: int = 12
    target: int = 13
    rollouts: int = 14
    drafter: int = 15
    evaluation: int = 16


@dataclass(frozen=True)
class TargetTraining:
    """Target: steps, schedule and mixture (share of chat sequences before and after the half)."""

    num_steps: int = 4000
    batch_size: int = 8
    learning_rate: float = 4e-3
    weight_decay: float = 0.05
    flat_share: float = 0.4
    warmup_steps: int = 40
    chat_share_early: float = 0.75
    chat_share_late: float = 0.9
    checkpoint_every: int = 200


@dataclass(frozen=True)
class RolloutSampling:
    """How many prompts the target continues for the drafter, and how."""

    num_chat: int = 8_000
    num_documents: int = 10_000
    num_validation: int = 200
    chat_temperatures: tuple[float, ...] = (0.0, 0.9)
    document_temperatures: tuple[float, ...] = (0.0, 0.7, 0.7, 0.7)
    document_prompt_length: int = 48
    max_new_tokens: int = 140
    maximum_length: int = 192
    batch_size: int = 256


@dataclass(frozen=True)
class DrafterTraining:
    """Drafter: steps, schedule, and the blocks (anchors) trained in each sequence."""

    num_steps: int = 9000
    batch_size: int = 8
    anchors_per_sequence: int = 32
    learning_rate: float = 3e-3
    weight_decay: float = 0.05
    flat_share: float = 0.4
    warmup_steps: int = 40
    position_decay: float = 4.0
    num_whole_epochs: int = 2
    late_document_share: float = 0.25  # in each later epoch: chat is what takes longest to learn
    checkpoint_every: int = 500


@dataclass(frozen=True)
class Evaluation:
    """What is measured at the end."""

    num_chat: int = 120
    num_hard: int = 24  # of each domain
    tasks_per_kind: int = 40
    max_new_tokens: int = 100
    chat_temperatures: tuple[float, ...] = (0.0, 1.0)
    hard_temperature: float = 0.7


SEEDS = Seeds()
TARGET_TRAINING = TargetTraining()
ROLLOUT_SAMPLING = RolloutSampling()
DRAFTER_TRAINING = DrafterTraining()
EVALUATION = Evaluation()
