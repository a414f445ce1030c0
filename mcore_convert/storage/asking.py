"""Requests to a remote store: repeated if the connection is lost, with a readable error if the store refuses."""

from __future__ import annotations

import errno
import logging
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from mcore_convert.storage.threads import aside

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

ATTEMPTS = 6
FIRST_WAIT = 0.1  # seconds before the second attempt; four times as many before each further one
# Errors that another attempt would raise again.
FINAL = (
    *(FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError, FileExistsError),
    *(NotImplementedError, TypeError, ValueError),
)
CREDENTIALS = re.compile(r"credential|access key|unauthori[sz]ed|forbidden|token|signature", re.IGNORECASE)
NO_ROOM = re.compile(r"quota|storage ?full|insufficient|no space|no room|507", re.IGNORECASE)


class StoreError(OSError):
    """Refusal of a store, with a hint."""

    def __init__(self, code: int, why: str, path: Path, hint: str | None = None) -> None:
        super().__init__(code, why, str(path))
        self.hint = hint


def asked(path: Path, question: Callable[[], Result]) -> Result:
    """Return the answer of a store; repeat the request if the connection is lost.

    Raises:
        OSError: the store refuses; with its message, the path, and a hint where one is known.
    """
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return aside(question)
        except Exception as error:  # each package has its own classes
            if attempt == ATTEMPTS or is_final(error):
                raise _refusal_of(path, error) from error
            logger.debug("attempt %d at %s: %s", attempt, path, first_line(error))
            time.sleep(FIRST_WAIT * 4 ** (attempt - 1))
    raise AssertionError


def is_final(error: BaseException) -> bool:
    """Return whether another attempt would fail in the same way."""
    status = _status_of(error)
    if status is not None:
        return 400 <= status < 500 and status not in (408, 425, 429)
    return isinstance(error, FINAL) or "Credentials" in type(error).__name__


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    text = str(getattr(error, "strerror", None) or error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def _refusal_of(path: Path, error: Exception) -> OSError:
    why = first_line(error)
    code = getattr(error, "errno", None) or errno.EIO
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(errno.ENOENT, why, str(path))
    if NO_ROOM.search(f"{error}"):
        return StoreError(errno.ENOSPC, why, path, "make room in the store, or choose another")
    if isinstance(error, PermissionError) or "Credentials" in type(error).__name__ or CREDENTIALS.search(why):
        refusal = PermissionError(errno.EACCES, why, str(path))
        refusal.hint = credentials_of(path)  # type: ignore[attr-defined]
        return refusal
    return StoreError(code, why, path)


def credentials_of(path: Path) -> str:
    """Return the hint for a store that does not accept the credentials."""
    protocol = path.parts[0].removesuffix(":")
    return f"set the credentials for {protocol} as fsspec takes them (FSSPEC_{protocol.upper()}_*), or its package does"


def _status_of(error: BaseException | None) -> int | None:
    """Return the HTTP status behind an error; None if its package does not say."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        else:
            status = (
                getattr(response, "status_code", None) or getattr(error, "status", None) or getattr(error, "code", None)
            )
        if isinstance(status, int):
            return status
        error = error.__cause__
    return None
