"""The entry point of the command: what a signal does before and after the command itself is decided here.

Nothing heavy is imported until that is so.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import NoReturn

_entered = False


def main() -> NoReturn:
    """Run the command line of this process."""
    global _entered
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _stop)
    from mcore_convert.cli import main as run

    _entered = True
    run()


def _stop(number: int, frame: FrameType | None) -> None:
    """End while modules are imported, when nothing was done yet; afterwards, when all is done, let the process end."""
    if not _entered:
        os.write(sys.stderr.fileno(), b"interrupted; nothing was left behind\n")
        os._exit(128 + number)


if __name__ == "__main__":
    main()
