"""A call in a process of its own: it may raise, hang, eat memory or die, and the caller goes on.

Processes are forked from a server that has imported the libraries once (`forkserver`), so each costs
milliseconds; where there is no such server they start from nothing, which takes seconds.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from ddtree_lab.records import format_bytes

PRELOADED = ["ddtree_lab.survey.architectures"]

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Ended:
    """How an isolated call ended: with a value, or with the reason why there is none.

    Args:
        raised: the class of the exception, if that was it.
        peak_bytes: the most memory its process held, if it lived to tell.
    """

    value: Any = None
    failure: str = ""
    raised: str = ""
    peak_bytes: int | None = None


def call_isolated(
    function: Callable[..., Any],
    *args: Any,
    seconds: float,
    memory_bytes: int,
    on_step: Tell = lambda step: None,
) -> Ended:
    """`function(*args, tell)` in a process of its own.

    Args:
        function: found by its module and name in the other process; its value and arguments are pickled.
        seconds: after which the process is killed.
        memory_bytes: of data the process may hold (on Linux).
        on_step: hears what the function tells, as it goes.
    """
    context = _context()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(theirs, function, args, memory_bytes), daemon=True)
    process.start()
    theirs.close()
    try:
        return _listen(ours, process, time.monotonic() + seconds, seconds, on_step)
    finally:
        if process.is_alive():
            process.kill()
        process.join()
        ours.close()


def _context() -> Any:
    has_server = "forkserver" in multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if has_server else "spawn")
    if has_server:
        context.set_forkserver_preload(PRELOADED)
    return context


def _listen(ours: Connection, process: Any, deadline: float, seconds: float, on_step: Tell) -> Ended:
    step = "starting"
    while (left := deadline - time.monotonic()) > 0:
        if not ours.poll(left):
            break
        try:
            kind, held, peak = ours.recv()
        except (EOFError, OSError):
            process.join(5)
            return Ended(failure=f"its process {_death(process.exitcode)} at {step}")
        if kind == "value":
            return Ended(held, peak_bytes=peak)
        if kind == "raised":
            return Ended(failure=held[1], raised=held[0], peak_bytes=peak)
        step = held
        on_step(step)
    return Ended(failure=f"no answer within {seconds:g} s at {step}")


def _death(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        with suppress(ValueError):
            return f"was killed by {signal.Signals(-exitcode).name}"
    return f"ended with status {exitcode}"


def _serve(
    theirs: Connection, function: Callable[..., Any], args: tuple[Any, ...], memory_bytes: int
) -> None:
    """The other process's whole life."""
    import torch

    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it with its parent, without a word
    _silence()
    _limit(memory_bytes)
    torch.set_num_threads(1)

    def tell(step: str) -> None:
        theirs.send(("step", step, None))

    try:
        value = function(*args, tell)
    except MemoryError:
        message = f"needs more than {format_bytes(memory_bytes)} of memory"
        theirs.send(("raised", ("MemoryError", message), _peak()))
    except Exception as error:  # whatever it raises, the caller has to go on
        message = " ".join(str(error).split()) or "no message"
        theirs.send(("raised", (type(error).__name__, message), _peak()))
    else:
        theirs.send(("value", value, _peak()))


def _silence() -> None:
    """No word of the libraries on the caller's terminal."""
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)


def _limit(memory_bytes: int) -> None:
    if sys.platform != "win32":
        import resource

        with suppress(ValueError, OSError):  # not every system has the limit
            resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _peak() -> int | None:
    if sys.platform == "win32":
        return None
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
