"""How the command ends: one sentence and the status that other tools give, whatever stopped it.

Errors of ours end with 1, an interrupt with 130, SIGTERM and SIGHUP with 143 and 129 after cleaning up (a server that
was started is stopped, a file half written removed), and a reader that closed its pipe quietly with 141.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

from loopkv.errors import LoopKVError

INTERRUPTED = 128 + signal.SIGINT
CLOSED_PIPE = 128 + signal.SIGPIPE
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def ends_like_other_tools() -> Iterator[None]:
    """Run the body, say in one sentence what stopped it, and exit.

    Raises:
        SystemExit: with the status; always.
    """
    with _ended_by_signals(), _kept_standard_output() as output:
        status = 0
        try:
            yield
        except LoopKVError as error:
            status = _say(f"error: {error}", 1)
        except KeyboardInterrupt:
            status = INTERRUPTED
        except BrokenPipeError:
            if not _is_closed(output):  # a pipe or socket of the work itself: a bug of ours
                raise
            status = CLOSED_PIPE
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
            if status == 1 and _is_closed(output):  # what rich and typer make of a closed pipe
                status = CLOSED_PIPE
        except OSError as problem:
            if problem.errno not in _FULL:
                raise
            status = _say(f"error: cannot write, got {problem.strerror}", 1)
        if status == INTERRUPTED:
            _say("interrupted", status)
        elif status - 128 in _ENDING_SIGNALS:
            _say(f"ended by {signal.Signals(status - 128).name}", status)
        if (unwritten := _flush()) is not None and status == 0:
            closed = isinstance(unwritten, BrokenPipeError)
            status = CLOSED_PIPE if closed else _say(f"error: cannot write, got {unwritten.strerror}", 1)
        raise SystemExit(status)


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Turn signals that would end the process at once into an exit that cleans up."""

    def leave(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {}
    if threading.current_thread() is threading.main_thread():
        # One that is ignored stays so (nohup).
        before = {n: signal.signal(n, leave) for n in _ENDING_SIGNALS if signal.getsignal(n) == signal.SIG_DFL}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _kept_standard_output() -> Iterator[int | None]:
    """A second descriptor of standard output: rich puts another file in its place once the reader has gone."""
    try:
        output = os.dup(1)
    except OSError:  # started without one
        yield None
        return
    try:
        yield output
    finally:
        os.close(output)


def _is_closed(output: int | None) -> bool:
    """Whether nobody reads this pipe any more."""
    if output is None:
        return False
    poll = select.poll()
    poll.register(output, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _flush() -> OSError | None:
    """Write what is left; where that fails, why, with nothing left for the interpreter to complain about."""
    failure = None
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        try:
            if stream is not None:
                stream.flush()
        except OSError as problem:
            failure = problem
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, number)
            os.close(nowhere)
    return failure


def _say(what: str, status: int) -> int:
    with contextlib.suppress(OSError):
        print(f"loopkv: {what}", file=sys.stderr)
    return status
