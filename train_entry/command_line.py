"""The command line of a run: CONFIG [key=value ...] becomes a configuration, and a failure a line and an exit code.

0: done, or stopped by a signal after saving; 1: refused; 2: wrong usage; 3: a bug, here or in code of the user's own.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mcore_convert.errors import ConvertError
from train_entry.extra import require_extra

if TYPE_CHECKING:
    from train_entry.config.schema import Config

REFUSED, USAGE, BUG = 1, 2, 3


def run(words: Sequence[str], train: Callable[[Config], None], usage: str) -> int:
    """Train by a command line, and return the exit code.

    Args:
        words: the arguments after the name of the program.
        train: called with the configuration, on each rank.
        usage: the help text of the program.
    """
    if not words or words[0] in ("-h", "--help"):
        if _is_first():
            write_line(usage)
        return 0 if words else USAGE
    try:
        return _run(words, train)
    except Exception as error:
        write_line("".join(traceback.format_exception(error)))
        report_error(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
        return BUG


def _run(words: Sequence[str], train: Callable[[Config], None]) -> int:
    try:
        require_extra()
        from train_entry.config.compose import load_config

        config = load_config(words[0], words[1:])
    except ConvertError as error:
        if _is_first():  # all ranks read the same words
            report_refusal(error)
        return refused()
    from train_entry.initialize import OtherRankError

    try:
        train(config)
    except OtherRankError:  # that rank reports it
        return refused()
    except ConvertError as error:
        report_refusal(error)
        return REFUSED
    return 0


def write_line(text: str) -> None:
    """Write a message to stderr at once, so that the lines of ranks that share a terminal do not interleave."""
    sys.stderr.write(f"{text.strip()}\n")
    sys.stderr.flush()


def report_refusal(error: ConvertError) -> None:
    """Write a refusal in full to stderr, and in one line to torchrun's error file."""
    write_line(f"error: {error}")
    items = "; ".join(error.items)
    hint = f" (hint: {' '.join(error.hint.split())})" if error.hint else ""
    record(f"{error.message}{': ' if items else ''}{items}{hint}")


def report_error(line: str) -> None:
    """Write an error of one line to stderr and to torchrun's error file."""
    write_line(f"error: {line}")
    record(line)


def record(line: str) -> None:
    """Write the line with which torchrun ends its own report, in the form of its `record` without a traceback."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        message = {"message": f"error: {' '.join(line.split())}", "extraInfo": {"timestamp": str(int(time.time()))}}
        Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps({"message": message}))


def refused() -> int:
    """Return a rank's exit code once another rank had time to report the error: torchrun then ends all ranks."""
    time.sleep(5)  # or until torchrun ends it: on a busy machine the other rank may be seconds behind
    return REFUSED


def _is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"
