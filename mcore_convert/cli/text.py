"""Words, tables and progress for a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence

from mcore_convert.amounts import in_bytes, in_parameters

__all__ = ["in_bytes", "in_parameters", "printable", "progress", "say", "show", "table"]


def say(line: str) -> None:
    """A message for the user, on stderr."""
    sys.stdout.flush()  # or a pipe that takes both would show the messages first
    sys.stderr.write(f"{printable(line)}\n")


def show(line: str = "") -> None:
    """A line of data, on stdout."""
    sys.stdout.write(f"{printable(line)}\n")


def printable(text: str) -> str:
    """The text with escapes for what a terminal would obey or cannot show: names come from files of strangers."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char == "\n" else char.encode("unicode_escape").decode() for char in text
    )


def table(rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> list[str]:
    """Rows as aligned lines; the columns in `right` are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


@contextlib.contextmanager
def progress(*, quiet: bool = False) -> Iterator[Callable[[int, int], None] | None]:
    """A bar of bytes, rate and time left on stderr; nothing where stderr is no terminal."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from tqdm import tqdm

    with tqdm(unit="B", unit_scale=True, unit_divisor=1000, leave=False, file=sys.stderr) as bar:

        def update(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield update
