"""Signals that ask a command to stop, as an exception that runs the cleanup on its way."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from mcore_convert.storage import destination

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """Signal that asks the command to stop. Not a KeyboardInterrupt: typer exits on that without a message.

    `remains` names what the command has left: as set by the command, or else as the disk shows at that moment.
    """

    def __init__(self, number: int, since: tuple[int, int] = (0, 0)) -> None:
        self.number = number
        self._since = since
        self._remains: str | None = None

    @property
    def remains(self) -> str:
        if self._remains is not None:
            return self._remains
        finished = [f"`{path}` was finished, and stands" for path in destination.finished(self._since[0])]
        left = [_what_is_left(path) for path in destination.left(self._since[1])]
        return "; ".join([*finished, *left]) or "nothing was left behind"

    @remains.setter
    def remains(self, what: str) -> None:
        self._remains = what


def _what_is_left(path: Path) -> str:
    goes_on = "--resume goes on with" if destination.has_journal(path) else "the next run clears"
    return f"`{path}` is left, which {goes_on}"


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Scope in which Ctrl-C, SIGTERM and a closed terminal clean up. Signals that the caller ignores stay ignored."""
    since = destination.counts()
    stopped = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        if not stopped:  # one is enough: a second one would interrupt the cleanup
            stopped = True
            raise Interrupted(number, since)

    with _handled_by(stop):
        yield


@contextlib.contextmanager
def keyboard_interrupts() -> Iterator[None]:
    """Scope in which these signals raise KeyboardInterrupt, the only one on which other libraries clean up."""
    came: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        came.append(number)
        raise KeyboardInterrupt

    with _handled_by(stop):
        try:
            yield
        except KeyboardInterrupt as error:
            raise Interrupted(came[0] if came else signal.SIGINT) from error


@contextlib.contextmanager
def _handled_by(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Scope in which a handler gets these signals, except those that the caller ignores."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    for number, earlier in before.items():
        if earlier is not signal.SIG_IGN:
            signal.signal(number, handler)
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
