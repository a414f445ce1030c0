"""The checkpoints of a run on disk: complete ones, and no other directories, are called `iter_*`.

iter_0000010   complete: everything in it was on the disk before it got this name
iter_0000020.mcore-convert-ID.partial   being written, or left by a killed run
iter_0000005.mcore-convert-ID.removed   being removed, or left by a killed run
latest_checkpointed_iteration.txt   Megatron-LM's tracker file: the iteration to resume from

The ID in a name marks the directories that a run may remove. Those of others stay as they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mcore_convert.checkpoints.manifest import check_manifest
from mcore_convert.errors import ConvertError, UnreadableCheckpoint
from mcore_convert.formats.megatron.run_directory import MAX_DIGITS, TRACKER, iterations
from mcore_convert.formats.torch_dist.checkpoint import TorchDistCheckpoint, open_torch_dist
from mcore_convert.storage.disk import remove_tree, sync, write_new, write_whole
from mcore_convert.storage.marker import REMOVED, finished_name, new_id, unfinished, unfinished_ones
from mcore_convert.storage.sources import Limit, Stamp, text_of, watched


@dataclass(frozen=True)
class Newest:
    """The checkpoint to resume from, open, if there is one; and the damage of each newer one.

    `stamps` are those of the files that opening it has read.
    """

    path: Path | None
    damaged: tuple[str, ...] = ()
    checkpoint: TorchDistCheckpoint | None = field(default=None, compare=False)
    stamps: Mapping[Path, Stamp] = field(default_factory=dict, compare=False)


def iteration_path(folder: Path, iteration: int) -> Path:
    """Return the path of the checkpoint of an iteration, whether or not it exists."""
    return folder / f"iter_{iteration:07d}"


def iteration_of(path: Path) -> int:
    """Return the iteration that a directory is named after; -1 for `release`."""
    return -1 if path.name == "release" else int(path.name.removeprefix("iter_"))


def newest(folder: Path) -> Newest:
    """Return the newest complete checkpoint that the tracker file does not exclude.

    With the tracker a user may go back to an earlier checkpoint: later ones are not used.
    """
    latest = _tracked(folder)
    damaged = []
    for path in sorted(iterations(folder), key=iteration_of, reverse=True):
        if latest is not None and iteration_of(path) > latest:
            continue
        try:
            with watched() as stamps:
                checkpoint = open_whole(path)
        except ConvertError as error:
            damaged.append("; ".join([error.message, *error.items]))
        else:
            return Newest(path, tuple(damaged), checkpoint, stamps)
    return Newest(None, tuple(damaged))


def open_whole(path: Path) -> TorchDistCheckpoint:
    """Open a `torch_dist` checkpoint, and prove by headers and sizes that it is complete.

    Raises:
        ConvertError: something is missing or cut short.
    """
    checkpoint = open_torch_dist(path)
    checkpoint.check_whole()
    check_manifest(checkpoint)
    _ = checkpoint.common
    if not (path / "metadata.json").is_file():
        raise UnreadableCheckpoint(f"`{path}` has no `metadata.json`")
    return checkpoint


def begin(final: Path) -> Path:
    """Create the directory in which a checkpoint is written."""
    discard(final)
    partial = unfinished(final, new_id())
    partial.mkdir(parents=True)
    return partial


def complete(partial: Path, files: Mapping[str, bytes], keep_last: int | None) -> Path:
    """Give a checkpoint its name, point the tracker to it, and remove the oldest ones.

    Args:
        partial: the directory from `begin`, with all that the ranks write in it, on the disk.
        files: its further files, by name.
        keep_last: number of checkpoints up to this one that stay; None for all.
    """
    for name, content in files.items():
        (partial / name).parent.mkdir(exist_ok=True, parents=True)
        write_new(partial / name, content)
    for directory in {(partial / name).parent for name in files} | {partial}:
        sync(directory)
    final = finished_name(partial)
    assert final is not None
    earlier = set_aside(final)  # damaged, or later than the checkpoint that the user went back to
    partial.rename(final)
    sync(final.parent)
    write_whole(final.parent / TRACKER, str(iteration_of(final)).encode())
    sync(final.parent)
    if earlier is not None:
        remove(earlier)
    if keep_last is not None:
        upto = [path for path in iterations(final.parent) if 0 <= iteration_of(path) <= iteration_of(final)]
        for path in sorted(upto, key=iteration_of)[:-keep_last]:
            remove(path)
    return final


def discard(final: Path) -> None:
    """Remove the unfinished directories of a checkpoint, of this run or of a killed one."""
    if final.parent.is_dir():
        for partial in unfinished_ones(final):
            remove(partial)


def clean(folder: Path) -> None:
    """Remove the remains of killed runs."""
    for leftover in folder.glob("*"):
        if finished_name(leftover) is not None:
            remove(leftover)


def set_aside(path: Path) -> Path | None:
    """Move a checkpoint aside, and return its new path; None if there is none."""
    if not path.exists():
        return None
    return path.rename(unfinished(path, new_id(), REMOVED))


def remove(path: Path) -> None:
    """Remove a directory, which is renamed first: a kill during the removal leaves nothing that looks complete.

    Files that the file system does not release yet, as NFS with open files, are left for the next start.
    """
    gone = path if finished_name(path) is not None else set_aside(path)
    if gone is not None:
        with contextlib.suppress(OSError):
            remove_tree(gone)


def _tracked(folder: Path) -> int | None:
    """Return the iteration that the tracker file names, -1 for `release`; None if it names none."""
    try:
        text = text_of(folder / TRACKER, Limit.TRACKER).strip()
    except OSError:
        return None
    if text == "release":
        return -1
    return int(text) if text.isdecimal() and len(text) <= MAX_DIGITS else None
