"""What the checks share: the port, the truth about the target, and the material to try them on.

The truth is the slowest obvious method: a forward of the whole text without any cache. Everything
is computed once and remembered, and forwards are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from ddtree_lab.compat import text_config
from ddtree_lab.doctor.bugs import BUGS, Bug, BuggyPort
from ddtree_lab.doctor.port import TransformersPort
from ddtree_lab.pair import Pair
from ddtree_lab.stages.cache import layer_kinds, make_cache
from ddtree_lab.stages.forward import prefill, run_target
from ddtree_lab.stages.tree import DraftTree

if TYPE_CHECKING:
    from ddtree_lab.doctor.checks.measuring import Acceptance
    from ddtree_lab.doctor.hypotheses import Outcome

NUM_TEXT_TOKENS = 24  # of the target's own continuation, along which everything is tried
NOISE_FACTOR = 30.0  # a difference this many times the rounding noise is no rounding
NOISE_FLOOR = 1e-5  # of the logits' scale, for targets whose noise happens to be nil

Probe = Callable[[Any], Tensor]


class PortError(Exception):
    """The port raised, or returned what is no answer."""

    def __init__(self, method: str, reason: str, error: BaseException | None = None) -> None:
        super().__init__(f"{method}: {reason}")
        self.method, self.reason, self.error = method, reason, error


class Examination:
    """One port of one pair under examination.

    Args:
        port: None for the built-in one.
        prompt: token ids, two at least.
        known: bugs that explain what was found so far; later checks start from them.
        unexplained: what probes gave that no bug explains; behind it the search is shorter.
    """

    def __init__(self, pair: Pair, port: Any, prompt: Sequence[int]) -> None:
        self.pair = pair
        self.port = Guarded(TransformersPort(pair) if port is None else port, pair.embeddings.vocab_size)
        self.prompt = list(prompt)
        self.known: list[Bug] = []
        self.unexplained: list[Outcome] = []
        self.others: list[Examination] = []
        self.intrinsic: Acceptance | None = None
        self.achieved: Acceptance | None = None
        self.is_builtin = isinstance(self.port.inner, TransformersPort)
        self.num_forwards = 0
        self._truth: dict[tuple[int, ...], Tensor] = {}

    @property
    def target(self) -> Any:
        return self.pair.target

    @cached_property
    def kinds(self) -> list[str]:
        return layer_kinds(self.target)

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(self.kinds) if "linear" in kind)

    def layers_of(self, kind: str) -> tuple[int, ...]:
        return tuple(i for i, found in enumerate(self.kinds) if found == kind)

    # The truth

    def truth(self, tokens: Sequence[int]) -> Float[Tensor, " vocab"]:
        """Logits after a text, from one forward of all of it without a cache."""
        key = tuple(int(token) for token in tokens)
        if key not in self._truth:
            self.num_forwards += 1
            out = run_target(self.target, torch.tensor([key]), None, logits_to_keep=1)
            self._truth[key] = out.logits[0, -1].float().cpu()
        return self._truth[key]

    def truth_of(self, tree: DraftTree, before: Sequence[int]) -> Float[Tensor, "node vocab"]:
        """Logits at each node of a tree that hangs below a text, each path alone."""
        paths = [tree.token_ids[tree.path(node)].tolist() for node in range(tree.num_nodes)]
        return torch.stack([self.truth([*before, *path]) for path in paths])

    @cached_property
    def text(self) -> list[int]:
        """The target's own greedy continuation of the prompt, end of sequence or not."""
        return self._continued[0]

    @property
    def text_logits(self) -> Float[Tensor, "token vocab"]:
        """The logits that gave each token of `text`."""
        return self._continued[1]

    @property
    def has_keyed_noise(self) -> bool:
        """Whether the port keys its noise by (seed, position) as this package does; it may say so itself."""
        return bool(getattr(self.port.inner, "keyed_noise", self.is_builtin))

    @cached_property
    def _continued(self) -> tuple[list[int], Tensor]:
        """The continuation, and the logits that gave it: one-token forwards on a clean cache."""
        cache = make_cache(self.target)
        out = prefill(self.target, torch.tensor([self.prompt]), cache)
        tokens, rows = [], []
        for _ in range(NUM_TEXT_TOKENS):
            rows.append(out.logits[0, -1].float().cpu())
            tokens.append(int(rows[-1].argmax()))
            out = run_target(self.target, torch.tensor([tokens[-1:]]), cache)
        self.num_forwards += NUM_TEXT_TOKENS + 1
        return tokens, torch.stack(rows)

    @cached_property
    def noise(self) -> float:
        """How far two right ways to the same logits differ here: the control without any drafter."""
        tokens, one_by_one = self._continued
        at_once = torch.stack([self.truth([*self.prompt, *tokens[:i]]) for i in range(len(tokens))])
        return float((at_once - one_by_one).abs().max())

    @cached_property
    def scale(self) -> float:
        rows = self.text_logits
        return float((rows - rows.mean(-1, keepdim=True)).abs().max())

    @cached_property
    def tolerance(self) -> float:
        """Largest difference of logits that rounding explains."""
        return max(NOISE_FACTOR * self.noise, NOISE_FLOOR * self.scale)

    # Material

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
        spine = [self.prompt[-1], *self.text][offset:]
        others = [self._second_choice(offset + depth) for depth in range(4)]
        tokens = [
            spine[0],
            others[0],
            spine[1],
            others[1],
            spine[2],
            others[2],
            spine[3],
            others[3],
            spine[4],
        ]
        return DraftTree.from_parents(tokens, [-1, 0, 0, 2, 2, 4, 4, 5, 6])

    def _second_choice(self, index: int) -> int:
        return int(self.text_logits[index].topk(2).indices[1])

    def before(self, offset: int = 0) -> list[int]:
        """The text before the root of `bushy_tree(offset)`."""
        return [*self.prompt, *self.text][: len(self.prompt) - 1 + offset]

    def prefilled(self, port: Any, offset: int = 0) -> Any:
        return port.prefill(torch.tensor([self.before(offset)]))

    @property
    def config(self) -> Any:
        return text_config(self.target)

    # Hypotheses

    def hypothesis(self, bugs: Sequence[Bug]) -> Guarded:
        """The built-in port with these bugs, new for every use and with a run behind it: bugs carry memory."""
        port = Guarded(BuggyPort(self.pair, bugs), self.pair.embeddings.vocab_size)
        with suppress(PortError):
            self.prefilled(port)
        return port

    def candidates(self, stages: Sequence[str]) -> list[Bug]:
        """Bugs of these stages that can be made on this pair."""
        return [bug for bug in BUGS.values() if bug.stage in stages and not bug.hindrance(self.pair)]


class Guarded:
    """A port whose failures are `PortError`s, so that one broken method is a finding and not a crash."""

    def __init__(self, port: Any, vocab_size: int) -> None:
        self.inner, self.vocab_size = port, vocab_size

    def has(self, method: str) -> bool:
        return callable(getattr(self.inner, method, None))

    def prefill(self, input_ids: Tensor) -> Any:
        return self._call("prefill", input_ids)

    def verify(self, state: Any, tree: DraftTree) -> Tensor:
        return self._logits("verify", tree.num_nodes, self._call("verify", state, tree))

    def commit(self, state: Any, path: Sequence[int]) -> Any:
        return self._call("commit", state, list(path))

    def draft(self, state: Any, anchor_token_id: int) -> Tensor:
        return self._logits("draft", None, self._call("draft", state, anchor_token_id))

    def cache(self, state: Any) -> Any:
        return self._call("cache", state)

    def generate(self, input_ids: Tensor, max_new_tokens: int, temperature: float, seed: int) -> list[int]:
        ids = self._call("generate", input_ids, max_new_tokens, temperature, seed)
        return [int(token) for token in ids]

    def _call(self, method: str, *args: Any) -> Any:
        try:
            with torch.no_grad():
                return getattr(self.inner, method)(*args)
        except (KeyboardInterrupt, torch.OutOfMemoryError):
            raise
        except Exception as error:  # a stranger's code may raise anything
            raise PortError(method, f"raised {type(error).__name__}: {error}", error) from error

    def _logits(self, method: str, num_rows: int | None, answer: Any) -> Tensor:
        if not isinstance(answer, Tensor):
            raise PortError(method, f"returned a {type(answer).__name__} where logits were expected")
        wanted = f"[{num_rows or 'depth'}, {self.vocab_size}]"
        shape = list(answer.shape)
        fits = answer.ndim == 2 and shape[1] == self.vocab_size and num_rows in (None, shape[0])
        if not fits:
            raise PortError(method, f"returned logits of shape {shape}; {wanted} was expected")
        if bool(answer.isnan().any()):
            rows = answer.isnan().any(-1).nonzero()[:, 0].tolist()
            raise PortError(method, f"returned NaN in rows {rows}")
        return answer.float().cpu()
