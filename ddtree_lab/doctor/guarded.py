"""A port whose failures are findings: it may raise, hang, or return what is no answer."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ddtree_lab.stages.tree import DraftTree

SECONDS_PER_CALL = 300.0


class PortError(Exception):
    """The port raised, hung, or returned what is no answer."""

    def __init__(self, method: str, reason: str, error: BaseException | None = None) -> None:
        super().__init__(f"{method}: {reason}")
        self.method, self.reason, self.error = method, reason, error

    def is_like(self, other: PortError) -> bool:
        """Whether two ports failed in the same way."""
        same_error = type(self.error) is type(other.error)
        return (
            self.method == other.method and same_error and (self.error is not None or self.reason == other.reason)
        )  # fmt: skip


class Overdue(BaseException):
    """Raised inside a call that takes too long; no `except Exception` of the port's catches it."""


class Guarded:
    """A port whose failures are `PortError`s, so that one broken method is a finding and not a crash.

    Args:
        seconds_per_call: a call that takes longer is stopped and its method not called again. Only where
            calls run in the main thread of a Unix process; elsewhere nothing is stopped.
    """

    def __init__(self, port: Any, vocab_size: int, seconds_per_call: float = SECONDS_PER_CALL) -> None:
        self.inner, self.vocab_size, self.seconds_per_call = port, vocab_size, seconds_per_call
        self.memo: dict[str, Any] = {}  # what several checks ask of it
        self._hung: set[str] = set()

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
        cache = self._call("cache", state)
        if not hasattr(cache, "layers"):
            raise PortError("cache", f"returned a {type(cache).__name__}, which has no layers")
        return cache

    def generate(self, input_ids: Tensor, max_new_tokens: int, temperature: float, seed: int) -> list[int]:
        ids = self._call("generate", input_ids, max_new_tokens, temperature, seed)
        try:
            tokens = [int(token) for token in ids]
        except (TypeError, ValueError) as error:
            reason = f"returned a {type(ids).__name__} where token ids were expected"
            raise PortError("generate", reason, error) from error
        return tokens

    def _call(self, method: str, *args: Any) -> Any:
        if method in self._hung:
            raise PortError(
                method, f"was stopped after {self.seconds_per_call:g} s before; it is not called again"
            )
        try:
            with torch.no_grad(), _time_limit(self.seconds_per_call):
                return getattr(self.inner, method)(*args)
        except (KeyboardInterrupt, torch.OutOfMemoryError):
            raise
        except Overdue as overdue:
            self._hung.add(method)
            shapes = ", ".join(_shape(arg) for arg in args)
            reason = f"did not return within {self.seconds_per_call:g} s ({shapes})"
            raise PortError(method, reason, overdue) from overdue
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


def _shape(arg: Any) -> str:
    if isinstance(arg, Tensor):
        return f"a tensor of {list(arg.shape)}"
    if isinstance(arg, DraftTree):
        return f"a tree of {arg.num_nodes} nodes"
    return type(arg).__name__


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise `Overdue` in the block once the time is over."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def stop(number: int, frame: Any) -> None:
        raise Overdue

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
