"""A pair: target, drafter and tokenizer that belong together, and the prompts that ship with the embedded one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ddtree_lab.compat import text_config
from ddtree_lab.drafter import DFlashDrafter
from ddtree_lab.stages.draft import Drafter
from ddtree_lab.stages.embedding import EmbeddingPath, resolve_embeddings


@dataclass(frozen=True)
class Prompt:
    """A bundled held-out prompt.

    Args:
        id: a short name, unique.
        domain: `"chat"` (a user's message), or `"docs"`, `"code"` (raw text to be continued): the hard ones.
        kind: what the task is.
        text: the message or the text.
        answer: a reference answer, if there is one.
    """

    id: str
    domain: str
    kind: str
    text: str
    answer: str | None = None

    @property
    def is_raw(self) -> bool:
        return self.domain != "chat"


@dataclass
class Pair:
    """A target and a drafter for it.

    Args:
        target: the model whose text is produced; left as it came.
        drafter: proposes tokens: a DFlash drafter trained for this target, an n-gram drafter, or any other
            `Drafter`.
        tokenizer: the target's.
        name: how it was asked for.
    """

    target: PreTrainedModel
    drafter: Drafter
    tokenizer: PreTrainedTokenizerBase | None = None
    name: str = "unnamed"

    def __post_init__(self) -> None:
        check_pair(self.target, self.drafter)

    @cached_property
    def embeddings(self) -> EmbeddingPath:
        return resolve_embeddings(self.target)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """End-of-sequence tokens: the generation config's, else the decoder config's, else the tokenizer's."""
        sources = (self.target.generation_config, text_config(self.target), self.tokenizer)
        named = (getattr(source, "eos_token_id", None) for source in sources)
        found = next((ids for ids in named if ids is not None), ())
        return frozenset([found] if isinstance(found, int) else found)

    def encode(
        self,
        prompt: str | Prompt | Sequence[int] | Tensor,
        *,
        system: str | None = None,
        raw: bool | None = None,
        enable_thinking: bool | None = None,
    ) -> Int[Tensor, "1 rows"]:
        """Token ids of a prompt, [1, P].

        A string is put through the chat template where the tokenizer has one; ids are taken as they are.

        Args:
            prompt: text, a bundled `Prompt`, or ids [P] or [1, P].
            system: a system message before it.
            raw: take the text as it is, without the chat template; for a bundled prompt, its own way is
                the default.
            enable_thinking: handed to the chat template where given; one that knows no thinking ignores it.

        Raises:
            ValueError: an empty prompt, a batch, ids outside the vocabulary, or something for the chat template
                where none is used.
        """
        if isinstance(prompt, Prompt):
            raw = prompt.is_raw if raw is None else raw
            prompt = prompt.text
        if isinstance(prompt, str) and not prompt:
            raise ValueError("prompt is empty; give some text.")
        ids: Any = prompt
        if isinstance(prompt, str):
            ids = self._tokenize(prompt, system, bool(raw), enable_thinking)
        ids = torch.as_tensor(ids, dtype=torch.long)
        ids = ids[None] if ids.ndim == 1 else ids
        if ids.ndim != 2 or ids.shape[0] != 1 or ids.shape[1] == 0:
            raise ValueError(f"prompt has shape {list(ids.shape)}; give one prompt of at least one token.")
        if int(ids.min()) < 0 or int(ids.max()) >= self.embeddings.vocab_size:
            raise ValueError(
                f"prompt has token ids from {int(ids.min())} to {int(ids.max())}; the target's embedding has "
                f"{self.embeddings.vocab_size} rows."
            )
        return ids

    def _tokenize(self, text: str, system: str | None, raw: bool, enable_thinking: bool | None) -> Any:
        if self.tokenizer is None:
            raise ValueError("prompt is a string but the pair has no tokenizer; give token ids.")
        if raw or not getattr(self.tokenizer, "chat_template", None):
            for name, given in (("system", system), ("enable_thinking", enable_thinking)):
                if given is not None:
                    why = "the prompt is raw text" if raw else "the tokenizer has none"
                    raise ValueError(f"{name} is for a chat template, but {why}; leave it out.")
            return self.tokenizer(text, return_tensors="pt")["input_ids"]
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": text})
        options = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        encoded = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True, **options
        )
        return encoded["input_ids"]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of tokens; their numbers where there is no tokenizer."""
        if self.tokenizer is None:
            return " ".join(map(str, token_ids))
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def __repr__(self) -> str:
        return f"Pair({self.name}: {type(self.target).__name__} + {type(self.drafter).__name__})"


def check_pair(target: PreTrainedModel, drafter: Drafter) -> None:
    """Refuse a drafter that was trained for another target, naming what does not fit."""
    if not isinstance(drafter, DFlashDrafter):
        return  # nothing was trained
    config, embeddings, decoder = drafter.config, resolve_embeddings(target), text_config(target)
    facts = {
        "hidden size of a tap": (config.target_hidden_size, decoder.hidden_size),
        "hidden size": (config.hidden_size, embeddings.hidden_size),
        "layers of the target": (config.num_target_layers, decoder.num_hidden_layers),
        "vocabulary": (config.vocab_size, decoder.vocab_size),
    }
    for what, (drafted, actual) in facts.items():
        if drafted != actual:
            raise ValueError(
                f"drafter was trained for another target: {what} is {drafted} in its config, {actual} in "
                f"{type(target).__name__}."
            )
    if config.mask_token_id >= embeddings.vocab_size:
        raise ValueError(
            f"drafter: mask_token_id {config.mask_token_id} is outside the target's embedding of "
            f"{embeddings.vocab_size} rows."
        )


def assets_folder() -> Path:
    """Where the embedded pair is: inside an installed wheel, or beside the package in a checkout."""
    package = Path(__file__).parent
    for folder in (package / "assets", package.parent / "assets"):
        if (folder / "embedded_pair").is_dir():
            return folder
    raise FileNotFoundError(
        f"the embedded pair is missing: neither {package / 'assets'} nor {package.parent / 'assets'} has "
        "embedded_pair/. Reinstall ddtree-lab, or clone the repository again."
    )


def bundled_prompts(domain: str | None = None) -> list[Prompt]:
    """Held-out prompts that ship with the embedded pair, the default one first.

    Args:
        domain: only `"chat"`, `"docs"` or `"code"`.
    """
    path = assets_folder() / "embedded_pair" / "prompts.json"
    entries = json.loads(path.read_text(encoding="utf-8"))
    prompts = [Prompt(e["id"], e["domain"], e["kind"], e["prompt"], e.get("answer")) for e in entries]
    return [prompt for prompt in prompts if domain in (None, prompt.domain)]
