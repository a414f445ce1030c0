"""Paths that do not exist, and the one that may have been meant."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from mcore_convert.errors import UnreadableCheckpoint

LIKE = 0.8  # of difflib: names that share less are not a slip


def near_miss(path: Path) -> Path | None:
    """The path that exists and was meant by one that does not; None where none is like it.

    Names that differ in a number are different things: `Llama-3.2-3B` is no slip of `Llama-3.2-1B`.
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
    """The error for a path that does not exist, as the user writes it."""
    meant = near_miss(Path(source))
    return UnreadableCheckpoint(f"`{source}` does not exist", hint=f"did you mean `{meant}`?" if meant else None)


def _numbers(name: str) -> list[str]:
    return re.findall(r"\d+", name)
