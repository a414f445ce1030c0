"""Destination directory of a conversion: claimed while it is written, and either complete or absent.

While a conversion runs there may be, beside `DST`: `DST.partial`, which is renamed to `DST` and holds a marker until
then; `DST.partial.lock`, held by the writing process, with the id of its work; `DST.partial.old-ID`, the previous
`DST`, during the exchange. Anything without one of these marks was made by someone else, and is refused.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_convert.errors import UnwritableTarget
from mcore_convert.storage.deferral import Deferral
from mcore_convert.storage.disk import mark, remark, remove_tree, sync
from mcore_convert.storage.locking import Lock, locked
from mcore_convert.storage.marker import MARKER, in_the_way, journals, mark_of, unmark
from mcore_convert.storage.remote import RemotePath
from mcore_convert.storage.sending import check_free_remote

# Destinations that this process has renamed into place, or is about to: the path, and the device and inode numbers.
_published: list[tuple[Path, tuple[int, int]]] = []
_began: list[Path] = []  # the partial directories that this process made


def partial_path(final: Path) -> Path:
    """Return the directory in which a conversion is written until it is complete."""
    return final.with_name(final.name + ".partial")


def finished(since: int = 0) -> list[Path]:
    """Return the destinations that this process has finished and that still exist,
    as the disk shows at this moment.

    Args:
        since: skip that many, a number that `counts` returned earlier.
    """
    return [path for path, identity in _published[since:] if _identity(path) == identity]


def left(since: int = 0) -> list[Path]:
    """Return the partial directories that this process made and could not remove; `since` as for `finished`."""
    return [path for path in _began[since:] if mark_of(path) is not None]


def counts() -> tuple[int, int]:
    """Return the numbers that `finished` and `left` take as `since`."""
    return len(_published), len(_began)


def check_free(final: Path, *, overwrite: bool) -> None:
    """Check that a destination can be made.

    Raises:
        UnwritableTarget: it exists and is not to be replaced, or is no name (`.`, `..`, `/`).
    """
    if final.name in ("", ".."):
        raise UnwritableTarget(f"`{final}` cannot be made or replaced", hint="name the directory to make")
    if isinstance(final, RemotePath):
        check_free_remote(final, overwrite=overwrite)
    elif os.path.lexists(final) and not overwrite:
        raise UnwritableTarget(f"`{final}` exists", hint="choose another destination, or pass --overwrite")


@dataclass
class Claim:
    """A destination that only this process writes: in `partial`, until `publish`.

    `cleared`: files that an earlier run had completed there were removed.
    """

    final: Path
    lock: Lock
    overwrite: bool
    cleared: bool = False

    @property
    def partial(self) -> Path:
        return partial_path(self.final)

    def publish(self) -> None:
        """Rename the directory to its final name. A previous destination is removed afterwards, or restored on failure.

        Signals are deferred meanwhile: halfway there is neither the old destination nor the new one.
        """
        with Deferral():
            self._publish()

    def _publish(self) -> None:
        final, partial = self.final, self.partial
        old = _old_path(final, self.lock.identity)
        identity = _identity(partial)
        assert identity is not None
        self.lock.record(publishes=identity)  # identifies the directory as ours once its marker is gone
        unmark(partial)
        sync(partial)
        _published.append((final, identity))
        try:
            if self.overwrite and os.path.lexists(final):
                final.rename(old)
            partial.rename(final)
        finally:
            _settle(final, old)
        try:
            sync(final.parent)
        except OSError as error:
            message = f"`{final}` is complete, but its name may not be on the disk yet: {error.strerror}"
            raise UnwritableTarget(message) from error


@contextlib.contextmanager
def claimed(final: Path, nbytes: int, *, overwrite: bool, resume: bool = False) -> Iterator[Claim]:
    """Make the partial directory, and remove it if anything goes wrong. The remains of a killed run are cleared.

    Args:
        resume: keep the files that an earlier run completed, and on failure those that this run completed.

    Raises:
        UnwritableTarget: another process writes it, something that is not ours is in its place, the destination has
            appeared, or `nbytes` do not fit.
        OSError: the file system refuses.
    """
    partial = partial_path(final)
    with Deferral() as signals:
        made = _make_folder(final.parent)
        try:
            with locked(partial.with_name(partial.name + ".lock"), partial) as lock:
                lock.stays = lock.earlier is not None
                holds_work = has_journal(partial)
                goes_on = resume and holds_work
                if not goes_on:
                    _clear(final, partial, lock.earlier)
                lock.stays = False
                check_free(final, overwrite=overwrite)  # again: another process may have finished
                free = shutil.disk_usage(final.parent).free + (_allocated(partial) if goes_on else 0)
                if free < nbytes:
                    lock.stays = goes_on
                    raise UnwritableTarget(f"`{final.parent}` has {free:,} bytes free, {nbytes:,} are needed")
                lock.record()
                _began.append(partial)
                if not goes_on:
                    partial.mkdir()
                try:
                    (remark if goes_on else mark)(partial, lock.identity)
                    try:
                        signals.admit()
                        yield Claim(final, lock, overwrite, cleared=holds_work and not resume)
                    finally:
                        signals.hold()
                except BaseException:
                    if not (resume and has_journal(partial)):
                        shutil.rmtree(partial, ignore_errors=True)
                    lock.stays = os.path.lexists(partial)
                    raise
        except BaseException:
            with contextlib.suppress(OSError):
                for folder in made:
                    folder.rmdir()
            raise


def has_journal(partial: Path) -> bool:
    """Return whether a partial directory is ours and holds completed files."""
    return mark_of(partial) is not None and bool(journals(partial))


def _allocated(folder: Path) -> int:
    """Return the disk space of the files below a folder, in bytes."""
    return sum(path.stat(follow_symlinks=False).st_blocks * 512 for path in folder.rglob("*"))


def _old_path(final: Path, identity: str) -> Path:
    return final.with_name(f"{final.name}.partial.old-{identity}")


def _identity(path: Path) -> tuple[int, int] | None:
    """Return the device and inode numbers of a path; None if it does not exist."""
    try:
        state = path.stat(follow_symlinks=False)
    except OSError:
        return None
    return state.st_dev, state.st_ino


def _settle(final: Path, old: Path) -> None:
    if not os.path.lexists(old):
        return
    if not os.path.lexists(final):
        old.rename(final)
        return
    try:
        remove_tree(old)
    except OSError as error:
        message = f"`{final}` is complete, but what it has replaced cannot be removed: {error.strerror}"
        raise UnwritableTarget(message, hint=f"remove `{old}`") from error


def _clear(final: Path, partial: Path, earlier: dict[str, Any] | None) -> None:
    """Remove the remains of a killed run; if it was killed during the exchange, restore its old destination."""
    for identity in {mark_of(partial), None if earlier is None else str(earlier["id"])} - {None}:
        _settle(final, _old_path(final, str(identity)))
    if not os.path.lexists(partial):
        return
    if mark_of(partial) is None and not _left_unmarked(partial, earlier):
        raise in_the_way(partial)
    # remove the marker last: if this process is killed, too, the rest can still be identified as ours
    for entry in partial.iterdir():
        if entry.name != MARKER:
            remove_tree(entry)
    remove_tree(partial)


def _left_unmarked(partial: Path, earlier: dict[str, Any] | None) -> bool:
    """Return whether a process was killed before it could mark the directory, or after it had removed the mark."""
    if earlier is None or partial.is_symlink() or not partial.is_dir():
        return False
    if earlier.get("publishes") is not None:
        return bool(list(_identity(partial) or ()) == earlier["publishes"])
    return all(entry.name == MARKER for entry in partial.iterdir())  # killed before the marker was whole


def _make_folder(folder: Path) -> list[Path]:
    """Make a directory and its parents, and return those that were missing, innermost first."""
    missing = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
    folder.mkdir(parents=True, exist_ok=True)
    return missing
