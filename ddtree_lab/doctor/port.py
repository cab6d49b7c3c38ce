"""Ports: what the doctor examines, and the built-in one.

A port is somebody's implementation of prefill, draft, verify and commit. The doctor only ever calls
these methods; whatever it learns, it learns from what they return.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor
from transformers.cache_utils import Cache

from ddtree_lab.doctor.loop import decode_with
from ddtree_lab.pair import Pair
from ddtree_lab.stages.cache import cache_length, make_cache, sliding_windows
from ddtree_lab.stages.commit import commit_path
from ddtree_lab.stages.draft import Context, draft_block, extend_context
from ddtree_lab.stages.forward import prefill
from ddtree_lab.stages.mask import build_mask
from ddtree_lab.stages.tree import DraftTree
from ddtree_lab.stages.verify import Verification, exact_method, verify_tree


@runtime_checkable
class Port(Protocol):
    """What a port must have. The state is its own affair; the doctor only hands it back.

    Optional methods widen the examination:

    * `draft(state, anchor_token_id)` → [depth, vocab] logits: the drafter's stages are examined too.
    * `cache(state)` → the target's `Cache`: what is wrong after a commit is told by layer and tensor.
    * `generate(input_ids, max_new_tokens, temperature, seed)` → new token ids: the loop around the
      stages (walk, stopping, sampling) is examined too.
    """

    def prefill(self, input_ids: Int[Tensor, "1 rows"]) -> Any:
        """Run a prompt; returns a state that holds all of its tokens."""
        ...

    def verify(self, state: Any, tree: DraftTree) -> Float[Tensor, "node vocab"]:
        """The target's logits at every node of a tree whose root is the next token of the text.

        The state must still be usable, for another `verify` or for `commit`.
        """
        ...

    def commit(self, state: Any, path: Sequence[int]) -> Any:
        """The state after a root path of the tree that was verified last."""
        ...


@dataclass
class PortState:
    """State of the built-in port: the tokens in the cache, what the drafter knows, the last verification."""

    token_ids: tuple[int, ...]
    cache: Cache
    context: Context
    verification: Verification | None = None


class TransformersPort:
    """The stages of this package behind the methods of a port.

    Args:
        pair: target and drafter.
        verify_method: as in `verify_tree`; `"auto"` is settled once, here.
        unchecked: as in `verify_tree`: examine a port of a module class (`register_port`) that is not exact yet.
    """

    def __init__(self, pair: Pair, verify_method: str = "auto", *, unchecked: bool = False) -> None:
        self.pair, self.unchecked = pair, unchecked
        self.verify_method = exact_method(pair.target) if verify_method == "auto" else verify_method
        self.tap_layer_ids = pair.drafter.tap_layer_ids

    def prefill(self, input_ids: Int[Tensor, "1 rows"]) -> PortState:
        cache = make_cache(self.pair.target)
        out = prefill(self.pair.target, input_ids, cache, self.tap_layer_ids)
        taps = None if out.taps is None else out.taps[0]
        tokens = tuple(input_ids[0].tolist())
        return PortState(tokens, cache, self._remember(taps, tokens, None))

    def draft(self, state: PortState, anchor_token_id: int) -> Float[Tensor, "depth vocab"]:
        drafter, embeddings = self.pair.drafter, self.pair.embeddings
        return draft_block(drafter, embeddings, state.context, anchor_token_id).logits

    def verify(self, state: PortState, tree: DraftTree) -> Float[Tensor, "node vocab"]:
        target, cache, embeddings = self.pair.target, state.cache, self.pair.embeddings
        mask = build_mask(
            tree, cache_length(cache), embeddings.dtype, embeddings.device, sliding_windows(cache)
        )
        state.verification = verify_tree(
            target,
            cache,
            tree,
            self.verify_method,
            mask=mask,
            tap_layer_ids=self.tap_layer_ids,
            unchecked=self.unchecked,
        )
        return state.verification.logits

    def commit(self, state: PortState, path: Sequence[int]) -> PortState:
        if state.verification is None:
            raise ValueError("state has no verified tree; call verify(state, tree) before commit.")
        verification, nodes = state.verification, list(path)
        cache = copy.copy(state.cache)  # is given new layers; the old state keeps its own
        commit_path(self.pair.target, cache, verification, nodes)
        tokens = tuple(verification.tree.token_ids[nodes].tolist())
        rows = self._context_rows(verification.tree, nodes)
        taps = None if verification.taps is None else verification.taps[rows]
        context = self._remember(taps, tuple(verification.tree.token_ids[rows].tolist()), state.context)
        return PortState(state.token_ids + tokens, cache, context)

    def cache(self, state: PortState) -> Cache:
        return state.cache

    def generate(
        self, input_ids: Int[Tensor, "1 rows"], max_new_tokens: int, temperature: float = 0.0, seed: int = 0
    ) -> list[int]:
        decoded = decode_with(
            self,
            input_ids[0].tolist(),
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed,
            eos_token_ids=self.pair.eos_token_ids,
        )
        return decoded.token_ids

    def _context_rows(self, tree: DraftTree, path: list[int]) -> list[int]:
        """Verified rows whose taps the drafter is given: those of the committed path."""
        return path

    def _remember(self, taps: Tensor | None, tokens: tuple[int, ...], context: Context | None) -> Context:
        return extend_context(self.pair.drafter, taps, context, tokens)
