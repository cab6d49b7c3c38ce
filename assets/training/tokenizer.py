"""Stage 1: a byte-level BPE vocabulary of 2,048 entries with ChatML turns."""

import json
import random
from itertools import islice
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from .documents import load_documents
from .settings import (
    END_OF_TEXT,
    MASK,
    SEEDS,
    SPECIAL_TOKENS,
    TOKENIZER_FOLDER,
    TURN_END,
    TURN_START,
    VOCABULARY_SIZE,
)
from .tasks import draw_tasks

# Words take a leading blank with them; every digit stands alone, so that column arithmetic can be
# learned; runs of spaces (indentation) and of newlines stay together.
PIECES = Regex(r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|[^\S\n]*\n+|[^\S\n]+(?!\S)|\s")

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- endif -%}
"""

NUM_CHAT_SAMPLES = 20_000
NUM_DOCUMENT_CHARACTERS = 5_000_000


def train_tokenizer() -> None:
    """Learn the merges on equal parts of chat and documents, save a folder `AutoTokenizer` reads."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(PIECES, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_vocabulary_text(), trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        mask_token=MASK,
        additional_special_tokens=[TURN_START],
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    save_tokenizer(wrapped, TOKENIZER_FOLDER)


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Save for `AutoTokenizer`, naming the class every transformers version knows."""
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    # Written by newer versions only, and how this process happened to load it.
    for key in ("backend", "is_local", "local_files_only"):
        config.pop(key, None)
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(TOKENIZER_FOLDER)


def chat_text(prompt: str, answer: str) -> tuple[str, str]:
    """A chat as the template writes it: everything before the answer, and the answer with its end."""
    before = f"{TURN_START}user\n{prompt}{TURN_END}\n{TURN_START}assistant\n"
    return before, f"{answer}{TURN_END}"


def _vocabulary_text():
    for task in islice(draw_tasks(SEEDS.vocabulary), NUM_CHAT_SAMPLES):
        yield task.prompt
        yield task.answer
    documents = [document for document in load_documents() if not document.is_held_out]
    random.Random(SEEDS.vocabulary).shuffle(documents)
    remaining = NUM_DOCUMENT_CHARACTERS
    for document in documents:
        if remaining <= 0:
            return
        yield document.text[:100_000]
        remaining -= min(len(document.text), 100_000)
