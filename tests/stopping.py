"""Signals that come at a chosen instruction of the main thread."""

from __future__ import annotations

import signal
import sys
from collections.abc import Container
from types import FrameType
from typing import Any


class Stopped(BaseException):
    """What the handler of a command raises."""


class SignalAt:
    """A scope in which SIGINT comes before one instruction of these files; counts them."""

    def __init__(self, files: Container[str | None], number: int | None = None) -> None:
        self.files, self.number, self.count, self.first = files, number, 0, True

    def __enter__(self) -> SignalAt:
        self.before, self.tracing = signal.signal(signal.SIGINT, self.handle), sys.gettrace()
        sys.settrace(self.trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self.tracing)
        signal.signal(signal.SIGINT, self.before)

    def handle(self, number: int, frame: FrameType | None) -> None:
        if self.first:  # as the command's: the next would stop the cleaning up
            self.first = False
            raise Stopped

    def trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in self.files:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            self.count += 1
            if self.count - 1 == self.number:
                signal.raise_signal(signal.SIGINT)
        return self.trace
