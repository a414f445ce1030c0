"""The mark of this tool's unfinished work on the disk. Nothing without it is ever cleared or renamed.

A directory that is being written holds a file MARKER with an id. A file, or a directory that is being replaced, cannot
hold one: it has the id in its name, and the lock beside it records that id.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path
from typing import Any

from mcore_convert.errors import UnwritableTarget

MARKER = ".mcore-convert-partial"
JOURNAL = ".mcore-convert-journal"  # prefix of the names of journals, which are removed with the marker
TOOL = "mcore-convert"
PARTIAL, REMOVED = ".partial", ".removed"
ID = re.compile(r"[0-9a-f]{32}")
UNFINISHED = re.compile(rf"(.+)\.{TOOL}-{ID.pattern}\.(?:partial|removed)", re.DOTALL)
LARGEST = 4096  # bytes of a record
HINT = "if it is nobody's work, remove it: a version from before there were marks may have left it"


def new_id() -> str:
    """Return an id that no other process has."""
    return os.urandom(16).hex()


def record_bytes(identity: str, **facts: Any) -> bytes:
    """Return the content of a marker, or of a lock."""
    return json.dumps({"tool": TOOL, "id": identity, **facts}).encode() + b"\n"


def record_of(content: bytes) -> dict[str, Any] | None:
    """Parse the content of a marker or lock; None if it is not a record of ours."""
    with contextlib.suppress(ValueError, RecursionError):
        record = json.loads(content)
        if isinstance(record, dict) and record.get("tool") == TOOL and ID.fullmatch(str(record.get("id"))):
            return record
    return None


def unmark(folder: Path) -> None:
    """Remove the mark and the journals: the directory is finished."""
    for journal in journals(folder):
        journal.unlink()
    (folder / MARKER).unlink(missing_ok=True)


def journals(folder: Path) -> list[Path]:
    """Return the journals in a directory."""
    return sorted(folder.glob(f"{JOURNAL}-*"))


def is_bookkeeping(name: str) -> bool:
    """Return whether a file in an unfinished directory is a marker or journal, and not part of the result."""
    return name == MARKER or name.startswith(f"{JOURNAL}-")


def mark_of(folder: Path) -> str | None:
    """Return the id that a directory is marked with; None if it is not ours, or not a directory."""
    try:
        if folder.is_symlink():
            return None
        fd = os.open(folder / MARKER, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        record = record_of(os.read(fd, LARGEST))
    except OSError:
        return None
    finally:
        os.close(fd)
    return None if record is None else str(record["id"])


def in_the_way(path: Path) -> UnwritableTarget:
    """Return the refusal for an unmarked file or directory in the place of unfinished work."""
    return UnwritableTarget(f"`{path}` is in the way, and no conversion left it", hint=HINT)


def unfinished(path: Path, identity: str, ending: str = PARTIAL) -> Path:
    """Return the name of a file or directory until it is complete, or while it is being removed."""
    return path.with_name(f"{path.name}.{TOOL}-{identity}{ending}")


def finished_name(path: Path) -> Path | None:
    """Return the final, or former, name of an unfinished file or directory; None if it is not one of ours."""
    match = UNFINISHED.fullmatch(path.name)
    return None if match is None else path.with_name(match[1])


def unfinished_ones(path: Path) -> list[Path]:
    """Return the unfinished files or directories that were to become `path`."""
    return [each for each in path.parent.iterdir() if finished_name(each) == path and each.name.endswith(PARTIAL)]
