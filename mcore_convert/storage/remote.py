"""Paths in remote stores (`s3://`, `gs://`, `hf://`, `memory://`), reached through fsspec and its packages.

A `RemotePath` is used as any other path: it joins, compares and lists. Where a local path asks the operating system, a
remote one asks the store: requests are repeated if the connection is lost, and refusals are OSErrors that name the URL.
A directory is listed once between two calls of `located`, which every command begins with.
"""

from __future__ import annotations

import errno
import fnmatch
import itertools
import os
import re
import stat
import sys
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path, PosixPath
from typing import Any, NamedTuple, NoReturn

from mcore_convert.errors import ConvertError
from mcore_convert.storage.asking import StoreError, asked, credentials_of, first_line

URL = re.compile(r"([a-z][a-z0-9+.-]+):/{1,2}([^/].*)", re.DOTALL)  # a `Path` of a URL has one slash

# Names in fsspec's packages for the time and the version of a file.
TIMES = ("LastModified", "mtime", "updated", "last_modified", "created")
VERSIONS = ("ETag", "etag", "md5Hash", "crc32c", "blob_id")


class Entry(NamedTuple):
    """Entry of a listing: a file or a directory."""

    is_dir: bool
    size: int = 0
    written: int = 0  # in ns, as far as the store says
    version: int = 0  # CRC-32 of its ETag or checksum


_serials = itertools.count()


class _Store:
    """One file system of fsspec, with the listings that were fetched."""

    def __init__(self, fs: Any) -> None:
        self.fs, self.serial = fs, next(_serials)
        self.listings: dict[tuple[str, ...], dict[str, Entry]] = {}
        self.roots: set[RemotePath] = set()


_stores: dict[str, _Store] = {}


class RemotePath(PosixPath):
    """A path in a remote store; its text is the URL."""

    if sys.version_info >= (3, 12):

        def with_segments(self, *segments: Any) -> Path:  # type: ignore[override]  # anything but a URL is a plain path
            plain = Path(*segments)
            return RemotePath(plain) if _is_remote(plain.parts) else plain

    else:

        @classmethod
        def _from_parsed_parts(cls, drv: str, root: str, parts: list[str]) -> Path:
            kind: Any = cls if not root and _is_remote(parts) else PosixPath
            path: Path = super()._from_parsed_parts.__func__(kind, drv, root, parts)  # type: ignore[misc]
            return path

    def __str__(self) -> str:
        return f"{self.parts[0]}//{'/'.join(self.parts[1:])}"

    def __fspath__(self) -> str:
        return str(self)

    @property
    def store(self) -> _Store:
        return _stores[self.parts[0].removesuffix(":")]

    @property
    def key(self) -> str:
        """Name of the path in fsspec's file system."""
        return str(self.store.fs._strip_protocol(str(self)))

    @property
    def _top(self) -> int:
        return 3 if self.parts[0] == "hf:" else 2

    @property
    def parent(self) -> RemotePath:
        """Directory that contains the path; a bucket, or a repository of the Hub, is its own parent."""
        return self if len(self.parts) <= self._top else RemotePath(*self.parts[:-1])

    @property
    def parents(self) -> Sequence[RemotePath]:
        return [RemotePath(*self.parts[:count]) for count in range(len(self.parts) - 1, self._top - 1, -1)]

    def entry(self) -> Entry | None:
        """Return the entry of the path in the store; None if there is none.

        It comes from the listing of a directory above, if one was fetched, after listing those between; otherwise
        from a request for this path alone.
        """
        listings, parts = self.store.listings, self.parts
        root = next((each for each in self.store.roots if each.parts == parts[: len(each.parts)] != parts), None)
        if root is not None and root.parts not in listings:
            root._alone()
        depth = next((n for n in range(len(parts) - 1, 1, -1) if parts[:n] in listings), None)
        if depth is None:
            return Entry(is_dir=True) if parts in listings else self._alone()
        while True:
            entry = _listing(RemotePath(*parts[:depth])).get(parts[depth])
            depth += 1
            if depth == len(parts) or entry is None:
                return entry
            if not entry.is_dir:
                return None

    def _alone(self) -> Entry | None:
        """Return the entry of the path without listing its parent directory, which may be large or forbidden."""
        try:
            rows = asked(self, lambda: self.store.fs.ls(self.key, detail=True))
        except FileNotFoundError:
            return None
        except PermissionError:
            if any(self.is_relative_to(root) for root in self.store.roots):
                raise
            return None  # outside of the paths that the user named
        if len(rows) == 1 and rows[0]["type"] != "directory" and rows[0]["name"].strip("/") == self.key.strip("/"):
            return _entry(rows[0])
        if not rows:
            return None
        self.store.listings[self.parts] = _entries(self, rows)
        return Entry(is_dir=True)

    def exists(self, *, follow_symlinks: bool = True) -> bool:
        return self.entry() is not None

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        entry = self.entry()
        return entry is not None and not entry.is_dir

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        entry = self.entry()
        return entry is not None and entry.is_dir

    def is_symlink(self) -> bool:
        return False

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        entry = self.entry()
        if entry is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))
        mode = stat.S_IFDIR if entry.is_dir else stat.S_IFREG
        seconds = entry.written // 10**9
        times = {"st_atime_ns": entry.written, "st_mtime_ns": entry.written, "st_ctime_ns": entry.written}
        plain = (mode | 0o444, entry.version, 0, 1, 0, 0, entry.size, seconds, seconds, seconds)
        return os.stat_result(plain, times)

    lstat = stat

    def iterdir(self) -> Iterator[RemotePath]:  # type: ignore[override]
        return (RemotePath(*self.parts, name) for name in sorted(_listing(self)))

    def glob(self, pattern: str, **_: Any) -> Iterator[RemotePath]:  # type: ignore[override]
        first, _slash, rest = str(pattern).partition("/")
        entry = self.entry()
        for path in self.iterdir() if entry is not None and entry.is_dir else ():
            if fnmatch.fnmatchcase(path.name, first):
                yield from path.glob(rest) if rest else [path]

    def rglob(self, pattern: str, **_: Any) -> Iterator[RemotePath]:  # type: ignore[override]
        for path in self.iterdir():
            if fnmatch.fnmatchcase(path.name, pattern):
                yield path
            if path.is_dir():
                yield from path.rglob(pattern)

    def resolve(self, strict: bool = False) -> RemotePath:
        return self

    def absolute(self) -> RemotePath:
        return self

    def is_absolute(self) -> bool:
        return True

    def _refused(self, *_: Any, **__: Any) -> NoReturn:
        """Raise for operations that only a local file system has."""
        raise StoreError(errno.EOPNOTSUPP, "a remote store cannot do this", self, "choose a directory on this machine")

    open = mkdir = rename = replace = unlink = rmdir = touch = symlink_to = hardlink_to = chmod = _refused


def located(source: str | Path) -> Path:
    """Return the path that a user names, in a store or on this machine.
    Earlier listings of the store are dropped.

    Raises:
        ConvertError: fsspec has no such file system, or it cannot be set up.
    """
    text = os.fspath(source)
    match = URL.fullmatch(text)
    if match is None or ("://" not in text and Path(text).exists()):
        return Path(source)
    protocol, rest = match.groups()
    if protocol in ("file", "local"):
        return Path("/", rest)
    path = RemotePath(f"{protocol}://{rest}")
    import fsspec

    try:
        fs = fsspec.filesystem(protocol)
    except (ImportError, ValueError) as error:
        raise ConvertError(
            f"`{path}` cannot be reached: {error}", hint=f"install what fsspec needs for {protocol}"
        ) from error
    except Exception as error:  # raised by the package while it searches for credentials
        raise ConvertError(f"`{path}` cannot be reached: {first_line(error)}", hint=credentials_of(path)) from error
    before = _stores.get(protocol)
    store = _stores[protocol] = _Store(fs)
    store.roots = {path, *(before.roots if before is not None and before.fs is fs else ())}
    fs.invalidate_cache()
    return path


def fresh(path: Path) -> None:
    """Drop all listings of the store of a path."""
    if isinstance(path, RemotePath):
        path.store.listings.clear()
        path.store.fs.invalidate_cache()


def _is_remote(parts: Sequence[str]) -> bool:
    return len(parts) > 1 and URL.fullmatch(f"{parts[0]}//{parts[1]}") is not None


def _listing(path: RemotePath) -> dict[str, Entry]:
    listings = path.store.listings
    if path.parts not in listings:
        listings[path.parts] = _entries(path, asked(path, lambda: path.store.fs.ls(path.key, detail=True)))
    return listings[path.parts]


def _entries(path: RemotePath, rows: Sequence[dict[str, Any]]) -> dict[str, Entry]:
    own = path.key.strip("/")  # some stores list the directory itself, too
    return {_name_of(row): _entry(row) for row in rows if row["name"].strip("/") != own}


def _name_of(row: dict[str, Any]) -> str:
    return str(row["name"]).rstrip("/").rpartition("/")[2]


def _entry(row: dict[str, Any]) -> Entry:
    """Convert a row of fsspec's listing; its packages differ in how they name times and versions."""
    if row["type"] == "directory":
        return Entry(is_dir=True)
    written = next((row[name] for name in TIMES if row.get(name)), 0)
    if hasattr(written, "timestamp"):
        written = written.timestamp()
    version = next((row[name] for name in VERSIONS if row.get(name)), "")
    seconds = written if isinstance(written, int | float) else zlib.crc32(str(written).encode())
    return Entry(False, int(row["size"] or 0), int(seconds * 10**9), zlib.crc32(str(version).encode()))
