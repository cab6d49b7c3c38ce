"""Embedding resolver: where the target keeps its input embedding and its output head.

The drafter owns neither, so both are borrowed from the target. A fixed path such as
`target.model.embed_tokens` breaks on the first multimodal wrapper; the library's own accessors
do not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from ddtree_lab.offload import execution_device
from ddtree_lab.records import Record

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class EmbeddingPath(Record):
    """The modules that turn ids into vectors and vectors into logits, and where they were found."""

    input_path: str
    output_path: str
    input: Any
    output: Any
    tied: bool

    @property
    def vocab_size(self) -> int:
        """Rows of the input embedding, padding rows included."""
        return int(self.input.weight.shape[0])

    @property
    def hidden_size(self) -> int:
        return int(self.input.weight.shape[1])

    @property
    def dtype(self) -> torch.dtype:
        return self.input.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where ids are looked up; an offloaded weight itself is on `meta`."""
        return execution_device(self.input)

    def embed(self, token_ids: Int[Tensor, "batch rows"]) -> Float[Tensor, "batch rows hidden"]:
        """Vectors of tokens, as the target's first layer gets them."""
        return self.input(token_ids.to(self.device))

    def logits(self, hidden: Float[Tensor, "batch rows hidden"]) -> Float[Tensor, "batch rows vocab"]:
        """The output head over normed hidden states, on the head's device and in its dtype."""
        dtype = self.output.weight.dtype  # integers where the head is quantised
        dtype = dtype if dtype.is_floating_point else self.dtype
        return self.output(hidden.to(device=execution_device(self.output), dtype=dtype))

    def __repr__(self) -> str:
        tied = "tied" if self.tied else "untied"
        return f"EmbeddingPath({self.input_path} → {self.output_path}, {tied}, {self.vocab_size}×{self.hidden_size})"

    def __rich__(self) -> Table:
        from rich.table import Table

        table = Table(title="embedding path", title_justify="left")
        for name in ("role", "path", "class", "shape", "dtype", "device"):
            table.add_column(name)
        for role, path, module in (
            ("input", self.input_path, self.input),
            ("output", self.output_path, self.output),
        ):
            weight = module.weight
            dtype = str(weight.dtype).removeprefix("torch.")
            table.add_row(
                role, path, type(module).__name__, str(list(weight.shape)), dtype, str(weight.device)
            )
        table.caption = "one weight, tied" if self.tied else "two weights, not tied"
        return table


def resolve_embeddings(target: PreTrainedModel) -> EmbeddingPath:
    """Find the input embedding and the output head by `get_input_embeddings` / `get_output_embeddings`.

    Returns:
        dotted paths, the modules, and whether they share one weight.

    Raises:
        ValueError: the model has no input embedding or no output head (an encoder, or a bare
            backbone such as `AutoModel` gives).
    """
    found: dict[str, Any] = {}
    for role, getter in (("input", "get_input_embeddings"), ("output", "get_output_embeddings")):
        module = getattr(target, getter)() if hasattr(target, getter) else None
        if module is None:
            raise ValueError(
                f"target: {type(target).__name__} has no {role} embedding ({getter}() gives None); "
                "load it with a language-model head, e.g. AutoModelForCausalLM."
            )
        found[role] = module
    paths = {role: _path_of(target, module) for role, module in found.items()}
    # Compared by storage: a tied model may hold one Parameter twice, or two views of one storage.
    tied = _address(found["input"].weight) == _address(found["output"].weight) != 0
    # On the meta device all pointers are 0, and accelerate gives every offloaded module a weight of its own.
    tied = tied or found["input"].weight is found["output"].weight
    tied = tied or f"{paths['output']}.weight" in (getattr(target, "all_tied_weights_keys", None) or {})
    return EmbeddingPath(paths["input"], paths["output"], found["input"], found["output"], bool(tied))


def _address(weight: Any) -> int:
    local = weight.to_local() if hasattr(weight, "to_local") else weight  # this process's part of a split one
    return local.data_ptr()


def _path_of(root: nn.Module, wanted: nn.Module) -> str:
    for name, module in root.named_modules():
        if module is wanted:
            return name
    return f"({type(wanted).__name__} outside the module tree)"
