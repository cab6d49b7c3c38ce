"""What ports are tried on: the target's own text, and trees along it, with the truth about each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from ddtree_lab.doctor.truth import Known, Truth
from ddtree_lab.pair import Pair
from ddtree_lab.stages.cache import layer_kinds, make_cache
from ddtree_lab.stages.forward import decoder_layers, prefill, run_target
from ddtree_lab.stages.tree import DraftTree

if TYPE_CHECKING:
    from ddtree_lab.doctor.guarded import Guarded
    from ddtree_lab.doctor.hypotheses import Outcome

NUM_TEXT_TOKENS = 24  # of the target's own continuation, along which everything is tried


@dataclass(frozen=True)
class LayerRows:
    """What each layer should read and return at the nodes of a tree, and the difference rounding explains."""

    inputs: Float[Tensor, "layer node hidden"]
    outputs: Float[Tensor, "layer node hidden"]
    slack: Float[Tensor, "layer node"]


class Material:
    """A pair, a prompt, and everything about them that does not depend on the port.

    Several ports of one pair can be examined on one material; what known mistakes give on it is then found
    once.

    Args:
        prompt: token ids, two at least.
        others: more prompts, for the acceptance.
        message: what the prompt says, before template and tokenizer, where it was text.
    """

    def __init__(
        self,
        pair: Pair,
        prompt: Sequence[int],
        others: Sequence[Sequence[int]] = (),
        message: str | None = None,
    ) -> None:
        self.pair, self.message = pair, message
        self.prompt = list(prompt)
        self.others = [Material(pair, other) for other in others]
        self.truth = Truth(pair.target, len(self.prompt) - 1)
        self.outcomes: dict[tuple[str, tuple[str, ...]], Outcome] = {}
        self.hypotheses: dict[tuple[str, tuple[str, ...]], Guarded] = {}
        self.rounds: dict[tuple[int, ...], list[tuple[int, int]]] = {}

    @property
    def target(self) -> Any:
        return self.pair.target

    @property
    def vocab_size(self) -> int:
        return self.pair.embeddings.vocab_size

    @cached_property
    def kinds(self) -> list[str]:
        return layer_kinds(self.target)

    @cached_property
    def has_layers(self) -> bool:
        """Whether the target's decoder layers can be found, and so be watched."""
        try:
            return bool(decoder_layers(self.target))
        except ValueError:
            return False

    @property
    def text(self) -> list[int]:
        """The target's own greedy continuation of the prompt, end of sequence or not."""
        return self._continued[0]

    @property
    def text_logits(self) -> Float[Tensor, "token vocab"]:
        """The logits that gave each token of `text`, from one-token forwards on a clean cache."""
        return self._continued[1]

    @cached_property
    def _continued(self) -> tuple[list[int], Tensor]:
        cache = make_cache(self.target)
        out = prefill(self.target, torch.tensor([self.prompt]), cache)
        tokens, rows = [], []
        for _ in range(NUM_TEXT_TOKENS):
            rows.append(out.logits[0, -1].float().cpu())
            tokens.append(int(rows[-1].argmax()))
            out = run_target(self.target, torch.tensor([tokens[-1:]]), cache)
        self.truth.num_forwards += NUM_TEXT_TOKENS + 1
        return tokens, torch.stack(rows)

    @cached_property
    def known_text(self) -> Known:
        """The truth about the logits before each token of `text`."""
        return self.truth.after([[*self.prompt, *self.text[:i]] for i in range(len(self.text))])

    # Trees

    def before(self, offset: int = 0) -> list[int]:
        """The text before token `offset`; token 0 is the last of the prompt, the first anchor."""
        return self.written[: len(self.prompt) - 1 + offset]

    @property
    def written(self) -> list[int]:
        return [*self.prompt, *self.text]

    def spine(self, offset: int, length: int) -> list[int]:
        """Tokens of the text from token `offset` on."""
        return [self.prompt[-1], *self.text][offset : offset + length]

    @cached_property
    def tree(self) -> DraftTree:
        """A tree with the target's own text as one branch and its second choices as the others."""
        return self.bushy_tree(0)

    def bushy_tree(self, offset: int) -> DraftTree:
        """Nine nodes below token `offset` of the text; second choices come before first ones.

        0 ─┬ 1          the wrong branch comes first, so that storage order and depth differ
           └ 2 ─┬ 3
                └ 4 ─┬ 5 ─ 7
                     └ 6 ─ 8
        """
        spine = self.spine(offset, 5)
        wrong = [self.second_choice(offset + depth) for depth in range(4)]
        tokens = [
            spine[0], wrong[0], spine[1], wrong[1], spine[2], wrong[2], spine[3], wrong[3], spine[4],
        ]  # fmt: skip
        return DraftTree.from_parents(tokens, [-1, 0, 0, 2, 2, 4, 4, 5, 6])

    def comb(self, offset: int, depth: int) -> DraftTree:
        """The text from token `offset` on as a spine of even nodes, a wrong token before each but the root."""
        spine = self.spine(offset, depth + 1)
        tokens, parents = [spine[0]], [-1]
        for d, token in enumerate(spine[1:]):
            tokens += [self.second_choice(offset + d), token]
            parents += [2 * d, 2 * d]
        return DraftTree.from_parents(tokens, parents)

    def second_choice(self, index: int) -> int:
        """What the target would have said instead of token `index` of its text."""
        return int(self.text_logits[index].topk(2).indices[1])

    def node_texts(self, tree: DraftTree, before: Sequence[int]) -> list[list[int]]:
        """The text up to each node of a tree that hangs below a text."""
        return [[*before, *tree.token_ids[tree.path(node)].tolist()] for node in range(tree.num_nodes)]

    def known(self, tree: DraftTree, before: Sequence[int]) -> Known:
        """The truth about the logits at each node, each path alone."""
        return self.truth.after(self.node_texts(tree, before))

    def layer_rows(self, tree: DraftTree, before: Sequence[int]) -> LayerRows:
        """The truth about the layers at each node, each path alone."""
        leaf_of = {node: leaf for leaf in tree.leaves() for node in tree.path(leaf)}
        texts = self.node_texts(tree, before)
        rows = []
        for node in range(tree.num_nodes):
            layers = self.truth.layers(texts[leaf_of[node]])
            at = len(texts[node]) - 1
            rows.append((layers.inputs[:, at], layers.outputs[:, at], layers.slack[:, at]))
        return LayerRows(*(torch.stack(column, dim=1) for column in zip(*rows, strict=True)))

    def clean_inputs(
        self, tree: DraftTree, before: Sequence[int], path: Sequence[int] = ()
    ) -> dict[tuple[int, ...], Tensor]:
        """What the layers should read while a port runs a prompt, a tree below it, and a path of it."""
        rows = self.layer_rows(tree, before)
        prompt = self.truth.layers(self.node_texts(tree, before)[tree.leaves()[-1]]).inputs[:, : len(before)]
        clean = {tuple(before): prompt, tuple(tree.token_ids.tolist()): rows.inputs}
        if path:
            clean.setdefault(tuple(tree.token_ids[list(path)].tolist()), rows.inputs[:, list(path)])
        return clean
