"""Paths: listing files, rebasing a path on another root, and suggesting an existing path for a mistyped one."""

from __future__ import annotations

import difflib
import re
from functools import lru_cache
from pathlib import Path

from mcore_convert.errors import UnreadableCheckpoint
from mcore_convert.storage.remote import RemotePath

LIKE = 0.8  # ratio of difflib: less similar names are not taken for a typing error


def files_in(folder: Path) -> dict[str, Path]:
    """Return all files below a folder, sorted, by their paths relative to it."""
    return {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}


@lru_cache(maxsize=4096)  # a file holds many weights
def moved(path: Path, root: Path, other: Path) -> Path:
    """Return the path below `other` that corresponds to `path` below `root`."""
    return other / path.relative_to(root)


@lru_cache(maxsize=4096)
def name_below(path: Path, root: Path) -> str:
    """Return the path of a file relative to a folder."""
    return str(path.relative_to(root))


def near_miss(path: Path) -> Path | None:
    """Return the existing path that a missing one was probably meant to be; None if none is similar.

    Names with different numbers are different things: `Llama-3.2-3B` is not a misspelt `Llama-3.2-1B`.
    """
    try:
        missing = next(here for here in (path, *path.parents) if here.parent.is_dir() and not here.exists())
        names = [entry.name for entry in missing.parent.iterdir()]
    except (StopIteration, OSError):
        return None
    alike = [name for name in names if _numbers(name) == _numbers(missing.name)]
    for name in difflib.get_close_matches(missing.name, alike, n=3, cutoff=LIKE):
        meant = missing.with_name(name) / path.relative_to(missing)
        if meant.exists():
            return meant
    return None


def absent(source: str | Path) -> UnreadableCheckpoint:
    """Return the error for a path that does not exist, spelled as the user did."""
    meant = None if isinstance(source, RemotePath) else near_miss(Path(source))
    return UnreadableCheckpoint(f"`{source}` does not exist", hint=f"did you mean `{meant}`?" if meant else None)


def _numbers(name: str) -> list[str]:
    return re.findall(r"\d+", name)
