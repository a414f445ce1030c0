"""The library's log on stderr, as requested by `-v` and `--log-level`."""

from __future__ import annotations

import logging
from enum import StrEnum

from mcore_convert.cli.terminal import say

LOGGERS = ("mcore_convert", "train_entry")
FORMAT = "%(asctime)s.%(msecs)03d %(levelname)s %(message)s"


class Level(StrEnum):
    """Levels of the log."""

    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


class _Stderr(logging.Handler):
    """Handler that writes like the command's messages, so that a progress bar makes room."""

    def emit(self, record: logging.LogRecord) -> None:
        say(self.format(record))


def verbose(count: int) -> int:
    """Log phases at `-v`, each file at `-vv`."""
    if count:
        _log(logging.INFO if count == 1 else logging.DEBUG)
    return count


def at_level(level: Level | None) -> Level | None:
    """Log from this level on."""
    if level is not None:
        _log(logging.getLevelNamesMapping()[level.upper()])
    return level


def _log(level: int) -> None:
    """Log to stderr; of two requested levels, the more verbose one counts."""
    for name in LOGGERS:
        logger = logging.getLogger(name)
        there = [handler for handler in logger.handlers if isinstance(handler, _Stderr)]
        if not there:
            handler = _Stderr()
            handler.setFormatter(logging.Formatter(FORMAT, "%H:%M:%S"))
            logger.addHandler(handler)
            logger.propagate = False
        logger.setLevel(min(level, logger.level) if there else level)


def silence() -> None:
    """Undo the settings, so that one command of a process does not log for the next."""
    for name in LOGGERS:
        logger = logging.getLogger(name)
        for handler in [handler for handler in logger.handlers if isinstance(handler, _Stderr)]:
            logger.removeHandler(handler)
            logger.propagate = True
            logger.setLevel(logging.NOTSET)
