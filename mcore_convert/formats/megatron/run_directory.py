"""Directory of a run's checkpoints: its tracker file, and the directories of its iterations.

    latest_checkpointed_iteration.txt      `release`, or the number of the newest iteration
    iter_0000010/  release/                a checkpoint each, in any of Megatron's formats

From Megatron-LM, `megatron/training/checkpointing.py` (`get_checkpoint_tracker_filename`, `get_checkpoint_name`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from mcore_convert.errors import UnreadableCheckpoint
from mcore_convert.storage.sources import Limit, text_of
from mcore_convert.storage.views import open_error

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
MAX_DIGITS = 18  # of an iteration: training cannot reach larger numbers
CARRIED = "hf"  # folder for a Hugging Face model's files other than weights
ITERATION = re.compile(r"iter_(\d+)")


def name_of(iteration: int | None) -> str:
    """Return the name of an iteration's directory; that of a release for None."""
    return RELEASE if iteration is None else f"iter_{iteration:07d}"


def tracker_bytes(iteration: int | None) -> bytes:
    """Return the content of the tracker file that names an iteration, or a release for None."""
    return (RELEASE if iteration is None else str(iteration)).encode()


def iteration_of(path: Path) -> int | None:
    """Return the iteration in the name of a directory; None if it has no such name."""
    named = ITERATION.fullmatch(path.name)
    return None if named is None or len(named[1]) > MAX_DIGITS else int(named[1])


def iterations(path: Path) -> list[Path]:
    """Return the directories of a run that may each hold a checkpoint."""
    return sorted(p for p in path.glob("*") if p.name == RELEASE or ITERATION.fullmatch(p.name))


def parse_tracker(tracker: Path) -> str:
    """Return the name of the directory that a tracker file names; empty for an empty file.

    Raises:
        UnreadableCheckpoint: its content is neither an iteration nor `release`.
        OSError: it cannot be read.
    """
    content = text_of(tracker, Limit.TRACKER).strip()
    if content in ("", RELEASE):
        return content
    if not content.isdecimal() or len(content) > MAX_DIGITS:
        raise UnreadableCheckpoint(f"`{tracker}` says `{content[:40]}`, which is neither an iteration nor `release`")
    return name_of(int(content))


def resolve(path: Path, is_checkpoint: Callable[[Path], object], content: str) -> Path:
    """Return `path` if it is a checkpoint, otherwise the directory that its tracker file names.

    Args:
        content: name of a file that every checkpoint has, for the error message.

    Raises:
        UnreadableCheckpoint: there is no tracker file, or it names a directory that does not exist.
    """
    if is_checkpoint(path):
        return path
    tracker = path / TRACKER
    if not tracker.is_file():
        saved = [str(p) for p in iterations(path)]
        raise UnreadableCheckpoint(
            f"`{path}` has no tracker file `{TRACKER}`",
            items=saved,
            hint=f"name the directory of one iteration: `{saved[-1]}`" if saved else "is this a Megatron checkpoint?",
        )
    try:
        name = parse_tracker(tracker)
    except OSError as error:
        raise open_error(tracker, error) from error
    if not name:
        raise UnreadableCheckpoint(f"`{tracker}` says ``, which is neither an iteration nor `release`")
    chosen = path / name
    if not is_checkpoint(chosen):
        raise UnreadableCheckpoint(f"`{tracker}` names `{chosen.name}`, which has no `{content}`")
    return chosen


def carried_in(checkpoint: Path) -> Path | None:
    """Return the folder of a Hugging Face model's other files, if a checkpoint was converted from one."""
    folder = checkpoint / CARRIED
    return folder if folder.is_dir() else None
