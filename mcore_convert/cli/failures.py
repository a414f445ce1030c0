"""Reports of a command that cannot continue: lines on stderr, with `--json` an object on stdout, and an exit code."""

from __future__ import annotations

import json
import logging
import os
import platform
import shlex
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from mcore_convert.cli.terminal import say, show
from mcore_convert.errors import ConvertError
from mcore_convert.version import VERSION

DONE, REFUSED, USAGE, BUG = 0, 1, 2, 3
TROUBLE = 2  # of `verify` and `diff`, where 1 means that they are different
COMPARING = ("verify", "diff")
ISSUE = "a bug of mcore-convert, unless code of your own was running: attach the file to an issue"

# typer has moved the base class of its usage errors; this access works in every version.
UsageError: Any = typer.BadParameter.__base__

logger = logging.getLogger(__name__)


class Failures:
    """Reporter of the failures of one command line, in the output form that it requests."""

    def __init__(self, words: Sequence[str]) -> None:
        options = words[: words.index("--")] if "--" in words else words
        self._words = words
        self._json = "--json" in options
        command = next((word for word in words if not word.startswith("-")), "")
        self.trouble = TROUBLE if command in COMPARING else REFUSED

    def refused(self, error: ConvertError) -> int:
        """Report a refusal, its reason and its remedy; return the exit code."""
        self._as_json(type(error).__name__, error.message, error.items, error.hint)
        say(f"error: {error.message}")
        for line in str(error).splitlines()[len(error.message.splitlines()) :]:
            say(line if line.startswith("hint:") else f"       {line}")
        return self.trouble

    def misused(self, error: Any) -> int:
        """Report a usage error in typer's words; return the exit code."""
        named = error.ctx.command_path if error.ctx is not None else "mcore-convert"
        self._as_json("UsageError", error.format_message(), (), f"`{named} --help` shows the usage")
        sys.stdout.flush()
        error.show()
        return USAGE

    def of_system(self, error: OSError) -> int:
        """Report an error of the operating system; return the exit code."""
        message = f"`{error.filename}`: {error.strerror}"
        self._as_json(type(error).__name__, message, (), None)
        say(f"error: {message}")
        return self.trouble

    def unexpected(self, error: Exception) -> int:
        """Write a report with the traceback to a file, and name the file in a line; return the exit code."""
        logger.debug("the traceback of what was not expected", exc_info=error)
        message = f"unexpected {traceback.format_exception_only(error)[-1].strip()}"
        place = self._report(error)
        items = () if place is None else (f"the report is in {place}",)
        self._as_json(type(error).__name__, message, items, ISSUE)
        where = f"; {items[0]}" if items else ""
        say(f"error: {message.splitlines()[0]}{where}")
        say(f"hint: {ISSUE}")
        if place is None:
            say("".join(traceback.format_exception(error)))
        return BUG

    def interrupted(self, number: int, remains: str) -> int:
        """Report the files that an interrupted command has left; return the exit code."""
        self._as_json("Interrupted", f"interrupted; {remains}", (), None)
        say(f"interrupted; {remains}")
        return 128 + number

    def _as_json(self, kind: str, message: str, items: Sequence[str], hint: str | None) -> None:
        if self._json:  # in one line, since the command may have written others
            show(json.dumps({"error": {"kind": kind, "message": message, "items": list(items), "hint": hint}}))

    def _report(self, error: Exception) -> Path | None:
        system, _, release, _, machine = os.uname()  # `platform.platform` starts a process for the processor's name
        lines = [
            f"mcore-convert {VERSION}, Python {platform.python_version()}, {system} {release} {machine}",
            f"$ mcore-convert {shlex.join(self._words)}",
            "",
            *"".join(traceback.format_exception(error)).splitlines(),
        ]
        try:
            with tempfile.NamedTemporaryFile(
                "w", prefix="mcore-convert-", suffix=".txt", delete=False, encoding="utf-8", errors="backslashreplace"
            ) as file:
                file.write("\n".join(lines) + "\n")
        except OSError:
            return None
        return Path(file.name)
