"""The mark of this tool's own unfinished work on the disk. Nothing that lacks it is ever cleared or renamed.

A directory that is being written holds a file MARKER with an id. What cannot hold one, a file or what a directory has
replaced, has the id in its name, and the lock beside it says which id that is.
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
JOURNAL = ".mcore-convert-journal"  # what begins the name of a journal, which goes with the marker
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
    """Return what such a content says; None where it is no record of ours."""
    with contextlib.suppress(ValueError, RecursionError):
        record = json.loads(content)
        if isinstance(record, dict) and record.get("tool") == TOOL and ID.fullmatch(str(record.get("id"))):
            return record
    return None


def unmark(folder: Path) -> None:
    """Take the mark and the journals away: the directory is finished."""
    for journal in journals(folder):
        journal.unlink()
    (folder / MARKER).unlink(missing_ok=True)


def journals(folder: Path) -> list[Path]:
    """Return the journals in a directory."""
    return sorted(folder.glob(f"{JOURNAL}-*"))


def is_bookkeeping(name: str) -> bool:
    """Return whether a file in an unfinished directory is ours, and no part of what is made."""
    return name == MARKER or name.startswith(f"{JOURNAL}-")


def mark_of(folder: Path) -> str | None:
    """Return the id that a directory is marked with; None where it is not ours, or no directory."""
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
    """Return the refusal for what stands where unfinished work would, and is not marked."""
    return UnwritableTarget(f"`{path}` is in the way, and no conversion left it", hint=HINT)


def unfinished(path: Path, identity: str, ending: str = PARTIAL) -> Path:
    """Return what a file or a directory is called until it is complete, or once it is no more."""
    return path.with_name(f"{path.name}.{TOOL}-{identity}{ending}")


def finished_name(path: Path) -> Path | None:
    """Return what an unfinished file or directory was to become, or was; None where it is not one of ours."""
    match = UNFINISHED.fullmatch(path.name)
    return None if match is None else path.with_name(match[1])


def unfinished_ones(path: Path) -> list[Path]:
    """Return the unfinished files or directories that have not become `path`."""
    return [each for each in path.parent.iterdir() if finished_name(each) == path and each.name.endswith(PARTIAL)]
