"""The entry point of the command, which decides the effect of signals before and after the command itself.

Nothing heavy is imported before these handlers are set.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from types import FrameType
from typing import NoReturn

STDERR = 2  # the last file descriptor of a standard stream

_entered = False


def main() -> NoReturn:
    """Run the command line of this process."""
    global _entered
    _open_closed_streams()
    _escape_what_no_reader_knows()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _stop)
    from mcore_convert.cli import main as run

    _entered = True
    run()


def _open_closed_streams() -> None:
    """Open the null device in place of standard streams that the caller has closed.

    Otherwise a file to write could get the descriptor of a stream, and messages would go into it.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= STDERR:
        os.set_inheritable(fd, True)
    os.close(fd)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: PTH123, SIM115 -- stays open


def _escape_what_no_reader_knows() -> None:
    """Have characters that the encoding of the terminal lacks written as escapes: names of files may have any.

    So is stderr from the start. In the locale C stdout is not, and hands on the bytes of a name as they are.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def _stop(number: int, frame: FrameType | None) -> None:
    """Exit during imports, when nothing was done yet; afterwards, when all is done, let the process end."""
    if not _entered:
        os.write(sys.stderr.fileno(), b"interrupted; nothing was left behind\n")
        os._exit(128 + number)


if __name__ == "__main__":
    main()
