"""The directory that a conversion makes: claimed while it is written, there when it is whole, or not there at all.

Beside `DST` there may be, for as long as a conversion runs: `DST.partial`, which becomes it; `DST.partial.lock`, held
by the process that writes; `DST.partial.old`, what `DST` was, for the moment of the exchange.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from mcore_convert.errors import UnwritableTarget

# File systems that cannot lock files, such as Lustre mounted without `flock`: better no lock than no conversion.
NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


def partial_path(final: Path) -> Path:
    """Where a conversion is written until it is complete."""
    return final.with_name(final.name + ".partial")


def check_free(final: Path, *, overwrite: bool) -> None:
    """Prove that a destination can be made.

    Raises:
        UnwritableTarget: it exists and is not to be replaced, or is no name (`.`, `..`, `/`).
    """
    if final.name in ("", ".."):
        raise UnwritableTarget(f"`{final}` cannot be made or replaced", hint="name the directory to make")
    if os.path.lexists(final) and not overwrite:
        raise UnwritableTarget(f"`{final}` exists", hint="choose another destination, or pass --overwrite")


@contextlib.contextmanager
def claimed(final: Path, nbytes: int, *, overwrite: bool) -> Iterator[None]:
    """Make the partial directory ours, and remove it if anything goes wrong. What a killed run left is cleared.

    Raises:
        UnwritableTarget: another process writes it, the destination has appeared, or `nbytes` do not fit.
        OSError: the file system refuses.
    """
    partial = partial_path(final)
    made = _make_folder(final.parent)
    try:
        with locked(partial.with_name(partial.name + ".lock"), partial):
            _clear(final, partial)
            check_free(final, overwrite=overwrite)  # again: another process may have finished
            free = shutil.disk_usage(final.parent).free
            if free < nbytes:
                raise UnwritableTarget(f"`{final.parent}` has {free:,} bytes free, {nbytes:,} are needed")
            try:
                yield
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
    except BaseException:
        with contextlib.suppress(OSError):
            for folder in made:
                folder.rmdir()
        raise


def replace(final: Path, partial: Path) -> None:
    """Give the partial directory its name. What had the name is removed when that is done, and else has it again."""
    old = _old_path(final)
    try:
        if os.path.lexists(final):
            final.rename(old)
        partial.rename(final)
    finally:
        _settle(final, old)


def _old_path(final: Path) -> Path:
    return final.with_name(final.name + ".partial.old")


def _settle(final: Path, old: Path) -> None:
    if not os.path.lexists(old):
        return
    if not os.path.lexists(final):
        old.rename(final)
        return
    try:
        if old.is_dir() and not old.is_symlink():
            shutil.rmtree(old)
        else:
            old.unlink()
    except OSError as error:
        message = f"`{final}` is complete, but what it has replaced cannot be removed: {error.strerror}"
        raise UnwritableTarget(message, hint=f"remove `{old}`") from error


def _clear(final: Path, partial: Path) -> None:
    """Remove what a killed run left; one that was killed during the exchange gets its destination back."""
    _settle(final, _old_path(final))
    if partial.is_dir() and not partial.is_symlink():
        shutil.rmtree(partial)
    elif os.path.lexists(partial):
        raise UnwritableTarget(f"`{partial}` is in the way, and no conversion left it", hint="remove it")


def _make_folder(folder: Path) -> list[Path]:
    """Make a directory and those above it; returns the ones that were not there, innermost first."""
    missing = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
    folder.mkdir(parents=True, exist_ok=True)
    return missing


@contextlib.contextmanager
def locked(file: Path, partial: Path) -> Iterator[None]:
    """Hold a lock file, and remove it at the end."""
    while True:
        lock = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(lock)
            raise UnwritableTarget(f"`{partial}` is being written by another process") from error
        except OSError as error:
            if error.errno not in NO_LOCKS:
                os.close(lock)
                raise
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), file.stat()):
                break
        os.close(lock)  # its last holder has removed it between our two calls
    try:
        yield
    finally:
        file.unlink(missing_ok=True)  # before the lock is given up, so that nobody else's is removed
        os.close(lock)
