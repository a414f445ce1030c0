"""Remote destination of a conversion: sent file by file, marked until it is complete, and removed on failure.

A store cannot rename a directory. So files are written to their final place, beside a marker, and the files that make
a checkpoint of them (`.metadata`, index, tracker, manifest) come last. Each file appears when it is complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mcore_convert.errors import UnreadableCheckpoint, UnwritableTarget
from mcore_convert.storage.asking import asked
from mcore_convert.storage.marker import MARKER, new_id, record_bytes
from mcore_convert.storage.remote import RemotePath, fresh, located

logger = logging.getLogger(__name__)

UNFINISHED = "is not whole: a conversion writes it, or was killed while it did"
READ_ONLY = {"hf:": "convert to a directory on this machine, and `mcore-convert push` it"}


def staged(final: Path) -> Path:
    """Return the directory in which a destination is made: the destination itself,
    or for a remote one a temporary directory of this user, named after the URL.

    Raises:
        UnwritableTarget: the directory is another user's.
    """
    if not isinstance(final, RemotePath):
        return final
    base = Path(tempfile.gettempdir(), f"mcore-convert-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        base.mkdir(mode=0o700)
    state = base.stat(follow_symlinks=False)
    if state.st_uid != os.getuid() or base.is_symlink():
        raise UnwritableTarget(f"`{base}` belongs to another user", hint="set TMPDIR to a directory of your own")
    return base / hashlib.sha256(str(final).encode()).hexdigest()[:16] / final.name


@contextlib.contextmanager
def staging(final: Path) -> Iterator[Path]:
    """A scope that gives the directory of `staged`, and removes its parents at the end."""
    place = staged(final)
    try:
        yield place
    finally:
        for folder in (place.parent, place.parent.parent) if place != final else ():
            with contextlib.suppress(OSError):  # not empty: it could not be cleared, or another conversion uses it
                folder.rmdir()


def source_at(source: str | Path) -> Path:
    """Return the path that a user names as a source.

    Raises:
        UnreadableCheckpoint: a conversion writes it, or was killed while it did.
        ConvertError: as `located`.
    """
    path = located(source)
    if isinstance(path, RemotePath) and path.is_dir() and (path / MARKER).is_file():
        raise UnreadableCheckpoint(f"`{path}` {UNFINISHED}", hint="wait for it, or run that conversion again")
    return path


def check_free_remote(final: RemotePath, *, overwrite: bool) -> None:
    """Check that a remote destination can be made.

    Raises:
        UnwritableTarget: it exists, it is a bucket, or the store is read-only here.
    """
    if final.parts[0] in READ_ONLY:
        raise UnwritableTarget(f"`{final}` cannot be written", hint=READ_ONLY[final.parts[0]])
    if final.parent is final:
        raise UnwritableTarget(f"`{final}` is all of a store", hint="name a directory in it to make")
    fresh(final)
    entry = final.entry()
    if entry is None or (entry.is_dir and not any(final.iterdir())):
        return
    if not (final / MARKER).is_file():
        hint = "choose another destination, or remove it: nothing can be replaced at once in a remote store"
        raise UnwritableTarget(f"`{final}` exists", hint=hint)
    if not overwrite:
        raise UnwritableTarget(f"`{final}` {UNFINISHED}", hint="if none runs, --overwrite clears it")


class Sending:
    """A remote destination while it is written."""

    def __init__(self, final: RemotePath) -> None:
        self.final = final
        self.sizes: dict[RemotePath, int] = {}

    def send(self, file: Path, target: RemotePath) -> None:
        """Send a complete file.

        Raises:
            OSError: the store refuses it.
        """
        size = file.stat().st_size
        self.sizes[target] = size
        fs, key = target.store.fs, target.key
        asked(target, lambda: fs.put_file(str(file), key))
        logger.debug("sent %s, %d bytes", target, size)

    def complete(self) -> RemotePath:
        """Return the directory, after checking that it has every file that was sent, in its full size.

        Raises:
            UnwritableTarget: a file is missing, or has another size.
        """
        fresh(self.final)
        self.final.is_dir()  # lists it
        sizes = {path: path.entry() for path in self.sizes}
        wrong = [
            f"{path}: {'absent' if entry is None else f'{entry.size:,}'} of {self.sizes[path]:,} bytes"
            for path, entry in sizes.items()
            if entry is None or entry.size != self.sizes[path]
        ]
        if wrong:
            raise UnwritableTarget(f"`{self.final}` does not have what was sent", items=wrong)
        return self.final

    def publish(self) -> None:
        """Remove the mark: the directory is complete."""
        remove(self.final / MARKER)
        fresh(self.final)

    def withdraw(self) -> None:
        """Remove the files that were sent, the last first, so that the directory never looks complete.

        Raises:
            OSError: the store refuses.
        """
        for path in reversed(self.sizes):
            with contextlib.suppress(FileNotFoundError):
                remove(path)
        with contextlib.suppress(FileNotFoundError):
            remove(self.final / MARKER)
        fresh(self.final)


@contextlib.contextmanager
def sending(final: RemotePath, *, overwrite: bool) -> Iterator[Sending]:
    """Mark a remote destination, and remove it if anything goes wrong. The remains of a killed run are cleared.

    Raises:
        UnwritableTarget: as `check_free_remote`.
        OSError: the store refuses.
    """
    check_free_remote(final, overwrite=overwrite)
    for path in sorted(final.rglob("*"), reverse=True) if final.is_dir() else ():
        if path.is_file() and path.name != MARKER:
            remove(path)
    try:
        _put(final / MARKER, record_bytes(new_id()))
    except OSError as error:
        missing = "make the bucket first" if isinstance(error, FileNotFoundError) else None
        hint = getattr(error, "hint", missing)
        raise UnwritableTarget(f"`{final}` cannot be written: {error.strerror}", hint=hint) from error
    sent = Sending(final)
    try:
        yield sent
    except BaseException:
        try:
            sent.withdraw()
        except OSError as error:
            logger.warning("`%s` could not be cleared, and is marked as not whole: %s", final, error.strerror)
        raise


def _put(target: RemotePath, content: bytes) -> None:
    fs, key = target.store.fs, target.key
    if not getattr(fs, "async_impl", False):
        fs.makedirs(fs._parent(key), exist_ok=True)  # a store with real directories; for buckets this would create one
    asked(target, lambda: fs.pipe_file(key, content))


def remove(path: RemotePath) -> None:
    """Remove a file of a store."""
    fs, key = path.store.fs, path.key
    asked(path, lambda: fs.rm_file(key))
