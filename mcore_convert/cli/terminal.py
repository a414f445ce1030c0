"""Messages, tables and progress for a terminal."""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Sequence

from mcore_convert.errors import MAX_ITEMS
from mcore_convert.storage.deferral import Deferral
from mcore_convert.storage.threads import started
from mcore_convert.text.quantities import in_bytes, in_parameters

__all__ = ["in_bytes", "in_parameters", "printable", "progress", "say", "show", "table"]


DRAW_EVERY = 0.2  # seconds

_bar: Bar | None = None  # the one on the terminal


def say(line: str) -> None:
    """Write a message for the user to stderr."""
    with _bar.aside() if _bar is not None else contextlib.nullcontext():
        sys.stdout.flush()  # otherwise a pipe that takes both would show the messages first
        sys.stderr.write(f"{printable(line)}\n")


def show(line: str = "") -> None:
    """Write a line of data to stdout."""
    with _bar.aside() if _bar is not None else contextlib.nullcontext():
        sys.stdout.write(f"{printable(line)}\n")
        if _bar is not None:
            sys.stdout.flush()


def show_items(lines: Sequence[str]) -> None:
    """Show the first lines of a list, and the number of further ones."""
    for line in lines[:MAX_ITEMS]:
        show(f"  {line}")
    if len(lines) > MAX_ITEMS:
        show(f"  ... and {len(lines) - MAX_ITEMS} more")


def printable(text: str) -> str:
    """Return the text with escapes for characters that a terminal obeys or cannot show, as names are not trusted."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char == "\n" else char.encode("unicode_escape").decode() for char in text
    )


def table(rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> list[str]:
    """Return rows as aligned lines; the columns in `right` are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


class Bar:
    """Line on stderr with the current phase, its time and, where they are counted, bytes and rate.

    It is a `progress` with phases, see `storage.phases`. A thread draws it, so that the time advances even while no
    byte is moved.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the state of the bar, and stderr
        self._name: str | None = None
        self._done, self._total, self._first = 0, 0, 0
        self._since = time.monotonic()
        self._is_drawn = False
        self._end = threading.Event()
        self._thread = started(self._draw_on)

    def __call__(self, done: int, total: int) -> None:
        """Set the number of bytes done, and their total."""
        if not self._total:
            self._first = done
        self._done, self._total = done, total

    def phase(self, name: str | None) -> None:
        """Show a new phase; with None, nothing."""
        with self._lock:
            self._erase()
            self._name, self._since = name, time.monotonic()
            self._done = self._total = self._first = 0

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Scope in which others may write lines to the terminal."""
        with self._lock:
            self._erase()
            yield

    def close(self) -> None:
        """Stop, and erase the bar."""
        with Deferral():
            self._end.set()
            self._thread.join()
        with self._lock:
            self._erase()

    def line(self) -> str:
        """Return the current line."""
        seconds = time.monotonic() - self._since
        if not self._total:
            return f"{self._name}  {seconds:.0f} s"
        from tqdm import tqdm

        return str(
            tqdm.format_meter(
                self._done,
                self._total,
                seconds,
                initial=self._first,
                prefix=self._name or "",
                unit="B",
                unit_scale=True,
                unit_divisor=1000,
                ncols=shutil.get_terminal_size().columns - 1,
            )
        )

    def _draw_on(self) -> None:
        while not self._end.wait(DRAW_EVERY):
            with self._lock:
                if self._name is not None:
                    width = shutil.get_terminal_size().columns - 1
                    with contextlib.suppress(OSError):  # the terminal is gone
                        sys.stderr.write(f"\r{printable(self.line())[:width]}\x1b[K")
                        sys.stderr.flush()
                        self._is_drawn = True

    def _erase(self) -> None:
        if self._is_drawn:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._is_drawn = False


@contextlib.contextmanager
def progress(*, quiet: bool = False) -> Iterator[Bar | None]:
    """Scope of a bar with the names of phases on stderr; None if stderr is not a terminal."""
    global _bar
    if quiet or not sys.stderr.isatty():
        yield None
        return
    _bar = Bar()
    try:
        yield _bar
    finally:
        bar, _bar = _bar, None
        bar.close()
