"""Token rows for the target: whole chats packed into rows, and windows of documents.

Rows are (N, SEQUENCE_LENGTH) int16; `labels` is the same with IGNORED where no loss is taken
(prompts and padding). Chat rows start with the beginning of a chat, as decoding does.
"""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from .documents import Document, load_documents
from .settings import BUILD, END_OF_TEXT, SEEDS, SEQUENCE_LENGTH, TARGET_TRAINING
from .tasks import draw_tasks
from .tokenizer import chat_text, load_tokenizer

IGNORED = -100
ROWS_FILE = BUILD / "target_rows.npz"


@dataclass(frozen=True)
class Rows:
    """Training rows of both domains and the hashes of every chat task that occurs in them."""

    chat_ids: np.ndarray
    chat_labels: np.ndarray
    document_ids: np.ndarray
    seen_tasks: np.ndarray  # uint64

    @classmethod
    def load(cls) -> "Rows":
        with np.load(ROWS_FILE) as stored:
            return cls(**{name: stored[name] for name in stored.files})


def build_rows() -> Rows:
    """Draw as many rows as the training will read (no row is read twice), store and return them."""
    if ROWS_FILE.exists():
        return Rows.load()
    training = TARGET_TRAINING
    num_rows = training.num_steps * training.batch_size
    chat_share = (training.chat_share_early + training.chat_share_late) / 2
    num_chat_rows = int(num_rows * chat_share * 1.02)  # the mixture is drawn, so leave some air
    chat_ids, chat_labels, seen_tasks = _chat_rows(num_chat_rows)
    rows = Rows(chat_ids, chat_labels, _document_rows(), seen_tasks)
    BUILD.mkdir(parents=True, exist_ok=True)
    np.savez(ROWS_FILE, **vars(rows))
    return rows


def _chat_rows(num_rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    ids = np.zeros((num_rows, SEQUENCE_LENGTH), np.int16)
    labels = np.full((num_rows, SEQUENCE_LENGTH), IGNORED, np.int16)
    seen_tasks: set[int] = set()
    chats = _encoded_chats(seen_tasks)
    for row in range(num_rows):
        filled = 0
        while filled < SEQUENCE_LENGTH:
            prompt_ids, answer_ids = next(chats)
            chat = np.array(prompt_ids + answer_ids, np.int16)[: SEQUENCE_LENGTH - filled]
            end = filled + len(chat)
            ids[row, filled:end] = chat
            answer = slice(min(filled + len(prompt_ids), end), end)
            labels[row, answer] = ids[row, answer]
            filled = end
    return ids, labels, np.array(sorted(seen_tasks), np.uint64)


def _encoded_chats(seen_tasks: set[int], batch_size: int = 2000) -> Iterator[tuple[list[int], list[int]]]:
    """Tokenised (prompt, answer + newline) of training tasks; notes each task in `seen_tasks`."""
    tokenizer = load_tokenizer()
    tasks = draw_tasks(SEEDS.chat_text)
    while True:
        batch = [next(tasks) for _ in range(batch_size)]
        seen_tasks.update(task.key_hash for task in batch)
        texts = [chat_text(task.prompt, task.answer) for task in batch]
        prompts = tokenizer([prompt for prompt, _ in texts]).input_ids
        answers = tokenizer([f"{answer}\n" for _, answer in texts]).input_ids
        yield from zip(prompts, answers, strict=True)


def _document_rows() -> np.ndarray:
    """Windows of SEQUENCE_LENGTH tokens over the training documents, shuffled."""
    stream = np.concatenate(list(encode_documents(d for d in load_documents() if not d.is_held_out)))
    num_rows = len(stream) // SEQUENCE_LENGTH
    rows = stream[: num_rows * SEQUENCE_LENGTH].reshape(num_rows, SEQUENCE_LENGTH)
    return np.random.default_rng(SEEDS.chat_text).permutation(rows)


def encode_documents(documents: Iterable[Document]) -> Iterator[np.ndarray]:
    """Token ids of each document, closed by the end-of-text token."""
    tokenizer = load_tokenizer()
    end = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
    for document in documents:
        yield np.array([*tokenizer(document.text).input_ids, end], np.int16)


def mixed_batches(rows: Rows, num_steps: int, start_step: int = 0) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Batches (ids, labels), each (batch, SEQUENCE_LENGTH) int64; the chat share rises at the half.

    The draw of domains is seeded and replayed from the start, so a resumed run sees what an
    uninterrupted one would have seen.
    """
    training = TARGET_TRAINING
    rng = random.Random(SEEDS.target)
    next_chat = next_document = 0
    for step in range(num_steps):
        share = training.chat_share_early if step < num_steps / 2 else training.chat_share_late
        num_chat = sum(rng.random() < share for _ in range(training.batch_size))
        chat = np.arange(next_chat, next_chat + num_chat) % len(rows.chat_ids)
        num_documents = training.batch_size - num_chat
        document = np.arange(next_document, next_document + num_documents) % len(rows.document_ids)
        next_chat, next_document = next_chat + num_chat, next_document + num_documents
        if step < start_step:
            continue
        ids = np.concatenate([rows.chat_ids[chat], rows.document_ids[document]])
        labels = np.concatenate([rows.chat_labels[chat], rows.document_ids[document]])
        # Interleave, because each process takes a contiguous share of the batch.
        order = rng_permutation(step, len(ids))
        yield ids[order].astype(np.int64), labels[order].astype(np.int64)


def rng_permutation(step: int, length: int) -> np.ndarray:
    return np.random.default_rng((SEEDS.target, step)).permutation(length)
