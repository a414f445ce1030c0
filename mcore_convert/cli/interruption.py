"""Signals that ask a command to stop, as an exception that cleans up on its way."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """A signal that asks the command to stop. Not a KeyboardInterrupt: typer ends on that without a word.

    `remains` says what the command has left.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.remains = "nothing was left behind"


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C, a polite kill and a closed terminal all clean up. A signal that the caller ignores (nohup) stays so."""
    with _handled_by(_stop):
        yield


def _stop(number: int, frame: FrameType | None) -> None:
    raise Interrupted(number)


@contextlib.contextmanager
def keyboard_interrupts() -> Iterator[None]:
    """A scope in which these signals are what Ctrl-C is to other people's libraries, which clean up on nothing else."""
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
    """A scope in which a handler gets these signals, but for those that the caller ignores."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    for number, earlier in before.items():
        if earlier is not signal.SIG_IGN:
            signal.signal(number, handler)
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
