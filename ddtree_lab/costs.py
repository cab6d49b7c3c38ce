"""What a round costs on this machine, by the rows it verifies: the half of a budget that acceptance is not."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float

from ddtree_lab.compat import is_tensor_parallel
from ddtree_lab.sampling import Sampler
from ddtree_lab.stages.cache import fork_cache, make_cache
from ddtree_lab.stages.commit import commit_path
from ddtree_lab.stages.draft import draft_block, extend_context
from ddtree_lab.stages.forward import prefill, run_target
from ddtree_lab.stages.tree import build_tree
from ddtree_lab.stages.verify import verify_tree
from ddtree_lab.stages.walk import walk_tree

if TYPE_CHECKING:
    from ddtree_lab.pair import Pair

ROWS = (1, 2, 5, 9, 17, 33, 65, 129, 257)
NUM_PROMPT_TOKENS = 64
PLAIN_STEPS = 4  # in a row, as in plain decoding: nothing else has been in the processor's caches


@dataclass(frozen=True)
class RoundCosts:
    """Seconds of a round's parts.

    Args:
        rows: numbers of verified rows, the root among them, rising.
        seconds: of a round with that many, the draft not counted.
        draft_seconds: of one draft.
        plain_seconds: of one token of plain decoding.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    draft_seconds: float
    plain_seconds: float

    @property
    def largest_budget(self) -> int:
        """Drafted nodes of the largest round that was measured."""
        return self.rows[-1] - 1

    def of(self, rows: Any) -> Any:
        """Seconds of rounds with so many rows, the draft not counted; linear between what was measured."""
        return np.interp(np.asarray(rows, dtype=float), self.rows, self.seconds)

    @cached_property
    def by_rows(self) -> Float[np.ndarray, " row"]:
        """`of` rounds with 1, 2, … rows up to the largest: what every adaptive round asks for."""
        return self.of(np.arange(1, self.rows[-1] + 1))


_measured: weakref.WeakKeyDictionary[Any, weakref.WeakKeyDictionary[Any, RoundCosts]] = (
    weakref.WeakKeyDictionary()
)


def costs_of(pair: Pair) -> RoundCosts:
    """The costs of a pair, measured when first asked for: a few passes of the target."""
    by_drafter = _measured.setdefault(pair.target, weakref.WeakKeyDictionary())
    if pair.drafter not in by_drafter:
        by_drafter[pair.drafter] = _agreed(pair, measure_costs(pair))
    return by_drafter[pair.drafter]


def _agreed(pair: Pair, costs: RoundCosts) -> RoundCosts:
    """Of a target whose layers are split over processes, the first one's: all have to choose the same trees."""
    if not is_tensor_parallel(pair.target):
        return costs
    agreed = [costs]
    torch.distributed.broadcast_object_list(agreed, src=0)
    return agreed[0]


@torch.inference_mode()  # as `generate` runs
def measure_costs(pair: Pair, repeats: int = 6, num_prompt_tokens: int = NUM_PROMPT_TOKENS) -> RoundCosts:
    """Time rounds of growing size after a prompt of arbitrary tokens.

    All sizes in turns, and of each the lower quartile: what else the machine does meanwhile can only add. A curve that
    is off by 15 % a point costs a choice by it 5 to 10 % of its speed (`bench.replay` can tell).

    It stops at a size that could not pay if every draft were accepted: a round emits one token for each drafted
    position and one more, so none may cost as much as all of them by plain decoding.
    """
    target, drafter = pair.target, pair.drafter
    vocab = pair.embeddings.vocab_size
    prompt = [(7 * i + 3) % vocab for i in range(num_prompt_tokens)]
    cache = make_cache(target)
    out = prefill(target, torch.tensor([prompt]), cache, drafter.tap_layer_ids)
    context = extend_context(drafter, None if out.taps is None else out.taps[0], token_ids=prompt)
    grown = fork_cache(cache)  # by a token with each plain pass

    def plain() -> None:
        for _ in range(PLAIN_STEPS):
            run_target(target, torch.tensor([[3]]), grown).logits.argmax(-1).tolist()

    def draft() -> None:
        draft_block(drafter, pair.embeddings, context, 3)

    logits = draft_block(drafter, pair.embeddings, context, 3).logits
    sampler = Sampler.from_settings(temperature=1.0)

    def whole(budget: int) -> Callable[[], None]:
        def run() -> None:
            tree = build_tree(logits, budget, 3)
            method = "auto" if budget else "paths"  # as the pipeline does
            verification = verify_tree(target, cache, tree, method, tap_layer_ids=drafter.tap_layer_ids)
            positions = num_prompt_tokens + tree.depths
            path = list(walk_tree(tree, sampler.choose(verification.logits, positions.tolist())).path)
            commit_path(target, fork_cache(cache, clone_states=False), verification, path)
            taps = None if verification.taps is None else verification.taps[path]
            extend_context(drafter, taps, context, tree.token_ids[path].tolist())

        return run

    whole(2)()  # the trial pass is behind us
    runs: list[Callable[[], None]] = [plain, draft]
    turns = [[_seconds(run) for run in runs]]
    dear = (drafter.num_draft_positions + 1) * turns[0][0] / PLAIN_STEPS
    for num_rows in ROWS:
        runs.append(whole(num_rows - 1))
        turns[0].append(_seconds(runs[-1]))
        # Processes in step cannot go by clocks of their own.
        if turns[0][-1] <= dear or is_tensor_parallel(target):
            continue
        # What takes long once may have waited for something else.
        if all(_seconds(runs[-1]) > dear for _ in range(2)):
            break
    turns += [[_seconds(run) for run in runs] for _ in range(repeats)]
    plain_seconds, draft_seconds, *seconds = np.quantile(turns, 0.25, axis=0).tolist()
    plain_seconds /= PLAIN_STEPS
    # What is larger by chance is no cheaper.
    rising = tuple(np.maximum.accumulate(seconds).tolist())
    return RoundCosts(ROWS[: len(rising)], rising, draft_seconds, plain_seconds)


def _seconds(run: Callable[[], Any]) -> float:
    began = clock()
    run()
    return clock() - began


def clock() -> float:
    """Seconds, after all that was asked of a device is done."""
    if torch.cuda.is_initialized():  # kernels run behind Python's back
        torch.cuda.synchronize()
    return time.perf_counter()
