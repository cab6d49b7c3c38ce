"""Stage 3: text the target writes itself, which is what the drafter has to foresee.

    torchrun --nproc-per-node 2 -m assets.training.rollouts

Chat prompts come from the training side of the split only, at temperatures 0 and 0.9; document
windows from training documents, one greedily for three at 0.7. A few held-out chat prompts are rolled out too: they are
the drafter's validation and never trained on.
"""

import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from transformers import Qwen3_5ForCausalLM

from .data import encode_documents
from .documents import load_documents
from .optimisation import Processes
from .sampling import continuations, load_target
from .settings import BUILD, ROLLOUT_SAMPLING, ROLLOUTS_FILE, SEEDS, TARGET_FOLDER, TURN_START
from .tasks import draw_tasks
from .tokenizer import chat_text, load_tokenizer


@dataclass(frozen=True)
class Prompt:
    """Token ids to continue, and how."""

    ids: tuple[int, ...]
    temperature: float
    domain: str  # "chat", "documents" or "validation"


@dataclass(frozen=True)
class Rollouts:
    """Sequences padded on the right: ids (N, L) int16, where the answer starts, where it ends."""

    ids: np.ndarray
    prompt_lengths: np.ndarray
    lengths: np.ndarray
    temperatures: np.ndarray  # at which each was written
    is_validation: np.ndarray
    seen_tasks: np.ndarray  # uint64 hashes of the chat tasks trained on

    @classmethod
    def load(cls) -> "Rollouts":
        with np.load(ROLLOUTS_FILE) as stored:
            return cls(**{name: stored[name] for name in stored.files})

    @property
    def is_chat(self) -> np.ndarray:
        """Whether a text is an answer, (N,): chats begin with a turn, documents anywhere."""
        return self.ids[:, 0] == load_tokenizer().convert_tokens_to_ids(TURN_START)

    def select(self, rows: np.ndarray) -> "Rollouts":
        return Rollouts(
            self.ids[rows],
            self.prompt_lengths[rows],
            self.lengths[rows],
            self.temperatures[rows],
            self.is_validation[rows],
            self.seen_tasks,
        )


def main() -> None:
    processes = Processes()
    prompts, seen_tasks = _draw_prompts()
    batches = list(_batches(prompts))
    target = load_target(TARGET_FOLDER)
    generator = torch.Generator().manual_seed(SEEDS.rollouts + processes.rank)
    sequences = []
    for index in range(processes.rank, len(batches), processes.count):
        sequences += _roll_out(target, batches[index], generator)
        if processes.is_first and index % 10 == 0:
            print(f"rollouts: batch {index} of {len(batches)}", flush=True)
    part = BUILD / f"rollouts_{processes.rank}.npz"
    np.savez(part, **_padded(sequences))
    processes.wait()
    if processes.is_first:
        _merge(processes.count, seen_tasks)
    processes.close()


def _draw_prompts() -> tuple[list[Prompt], np.ndarray]:
    sampling = ROLLOUT_SAMPLING
    tokenizer = load_tokenizer()
    tasks = list(islice(draw_tasks(SEEDS.rollouts), sampling.num_chat))
    held_out = list(islice(draw_tasks(SEEDS.rollouts, held_out=True), sampling.num_validation))
    texts = [chat_text(task.prompt, "")[0] for task in tasks + held_out]
    prompts = []
    for index, ids in enumerate(tokenizer(texts).input_ids):
        is_validation = index >= len(tasks)
        temperature = sampling.chat_temperatures[index % len(sampling.chat_temperatures)]
        prompts.append(
            Prompt(
                tuple(ids), 0.0 if is_validation else temperature, "validation" if is_validation else "chat"
            )
        )
    prompts += _document_prompts(sampling.num_documents)
    return prompts, np.array(sorted({task.key_hash for task in tasks}), np.uint64)


def _document_prompts(count: int) -> Iterator[Prompt]:
    """Random windows of training documents."""
    sampling = ROLLOUT_SAMPLING
    rng = random.Random(SEEDS.rollouts)
    documents = [document for document in load_documents() if not document.is_held_out]
    stream = np.concatenate(list(encode_documents(documents)))
    for index in range(count):
        start = rng.randrange(len(stream) - sampling.document_prompt_length)
        window = stream[start : start + sampling.document_prompt_length]
        temperature = sampling.document_temperatures[index % len(sampling.document_temperatures)]
        yield Prompt(tuple(window.tolist()), temperature, "documents")


def _batches(prompts: list[Prompt]) -> Iterator[list[Prompt]]:
    """Prompts of one length together."""
    groups: dict[int, list[Prompt]] = defaultdict(list)
    for prompt in prompts:
        groups[len(prompt.ids)].append(prompt)
    for key in sorted(groups):
        group = groups[key]
        for start in range(0, len(group), ROLLOUT_SAMPLING.batch_size):
            yield group[start : start + ROLLOUT_SAMPLING.batch_size]


def _roll_out(
    target: Qwen3_5ForCausalLM, batch: list[Prompt], generator: torch.Generator
) -> list[tuple[Prompt, list[int]]]:
    ids = torch.tensor([prompt.ids for prompt in batch])
    temperatures = torch.tensor([prompt.temperature for prompt in batch])
    answers = continuations(target, ids, ROLLOUT_SAMPLING.max_new_tokens, temperatures, generator)
    return list(zip(batch, answers, strict=True))


def _padded(sequences: list[tuple[Prompt, list[int]]]) -> dict[str, np.ndarray]:
    width = ROLLOUT_SAMPLING.maximum_length
    ids = np.zeros((len(sequences), width), np.int16)
    prompt_lengths = np.array([len(prompt.ids) for prompt, _ in sequences])
    lengths = np.array([min(width, len(prompt.ids) + len(answer)) for prompt, answer in sequences])
    for row, (prompt, answer) in enumerate(sequences):
        ids[row, : lengths[row]] = [*prompt.ids, *answer][:width]
    is_validation = np.array([prompt.domain == "validation" for prompt, _ in sequences])
    return {
        "ids": ids, "prompt_lengths": prompt_lengths, "lengths": lengths, "is_validation": is_validation,
        "temperatures": np.array([prompt.temperature for prompt, _ in sequences], np.float32),
    }  # fmt: skip


def _merge(count: int, seen_tasks: np.ndarray) -> None:
    """One file of the processes' parts; sequences with nothing to draft (under 3 tokens) are left out."""
    parts = [np.load(BUILD / f"rollouts_{rank}.npz") for rank in range(count)]
    merged = {name: np.concatenate([part[name] for part in parts]) for name in parts[0].files}
    keep = merged["lengths"] - merged["prompt_lengths"] >= 3
    np.savez(ROLLOUTS_FILE, **{name: array[keep] for name, array in merged.items()}, seen_tasks=seen_tasks)
    print(f"rollouts: {int(keep.sum())} sequences, {int(merged['lengths'][keep].sum())} tokens", flush=True)


if __name__ == "__main__":
    main()
