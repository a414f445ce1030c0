"""The manifest of a checkpoint, `mcore_convert.json`: which tensors were written where, from what, with checksums.

It lies in the checkpoint's own directory, beside `.metadata` or `config.json`, and covers that directory. It
is a function of the source, the options and the version: it has no time and no path of a machine. One line per
file and per tensor; the last line has the checksum of all lines before. `docs/manifest.md` describes its fields.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from mcore_convert.errors import UnreadableCheckpoint, fold
from mcore_convert.formats.base import Checkpoint
from mcore_convert.formats.files.json_file import cost_of, parsed
from mcore_convert.formats.files.model_folder import CARD
from mcore_convert.storage.digests import ALGORITHM, BLOCK, Unsealed, sealed
from mcore_convert.storage.disk import write_parts
from mcore_convert.storage.sources import MEMORY, Limit, Unfit, content_of, handle_of, open_file, size_of
from mcore_convert.storage.views import TensorMeta, View, is_inside, open_error
from mcore_convert.version import VERSION

MANIFEST = "mcore_convert.json"
FORMAT = 1  # version of the manifest's own format
BEGINNING = re.compile(rb'{"mcore_convert": "[^"\\\n]*",\n"manifest": (\d{1,9}),\n')
CHECKSUM = re.compile(rb'"checksum": "([0-9a-f]{16})"}\n')
HEAD = 2**12  # bytes that contain the beginning
KEPT, KEPT_STRING = 250, 50  # bytes of memory for an entry, and for each of its strings beyond the text itself
CHANGED_HINT = f"if the change is meant, remove `{MANIFEST}`; else copy or convert the checkpoint again"
Taken = TypeVar("Taken")
UNCOVERED = (CARD, MANIFEST)  # a model card is there to be edited


class Part(NamedTuple):
    """Bytes `start` to `end` of a file, which hold a box of a tensor; `sums` are the checksums of its blocks."""

    tensor: str
    file: str
    start: int
    end: int
    sums: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class File:
    """A file: its size, and the checksum of the bytes outside of tensors; None if none was computed."""

    size: int
    rest: str | None


@dataclass(frozen=True)
class Manifest:
    """Content of a manifest. `headers` are the tensors that a reader of the format sees, by its own names."""

    path: Path
    version: str
    files: Mapping[str, File]
    headers: Mapping[str, TensorMeta]
    parts: tuple[Part, ...]
    num_tensors: int
    block: int
    checksum: str

    @property
    def has_checksums(self) -> bool:
        """Whether checksums were computed when it was written."""
        return all(file.rest is not None for file in self.files.values())

    @cached_property
    def runs(self) -> Mapping[str, Sequence[tuple[int, int]]]:
        """Byte runs of each file that hold tensors, from the first byte to behind the last, in order."""
        runs: dict[str, set[tuple[int, int]]] = {}
        for part in self.parts:
            if part.start < part.end:
                runs.setdefault(part.file, set()).add((part.start, part.end))
        return {name: sorted(each) for name, each in runs.items()}

    @property
    def folder(self) -> Path:
        """Directory that the manifest covers."""
        return self.path.parent


def manifest_lines(
    facts: Mapping[str, Any],
    files: Mapping[str, Mapping[str, Any]],
    headers: Mapping[str, TensorMeta],
    tensors: Iterable[tuple[str, Mapping[str, Any]]],
) -> Iterator[bytes]:
    """Yield the content of a manifest, line by line."""

    def pairs(entries: Iterable[tuple[str, Any]]) -> Iterator[str]:
        before = "\n"
        for name, value in entries:
            yield f"{before}{json.dumps({name: value})[1:-1]}"
            before = ",\n"

    named = {"mcore_convert": VERSION, "manifest": FORMAT, **facts, "checksums": {"kind": ALGORITHM, "block": BLOCK}}
    yield ("{" + ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in named.items())).encode()
    sections = {
        "files": files.items(),
        "headers": ((name, [meta.dtype, list(meta.shape)]) for name, meta in headers.items()),
        "tensors": tensors,
    }
    for section, entries in sections.items():
        yield f',\n"{section}": {{'.encode()
        for text in pairs(entries):
            yield text.encode()
        yield b"\n}"
    yield b",\n"


def write_manifest(path: Path, lines: Iterable[bytes]) -> None:
    """Write a manifest, and return once it is on the disk.

    Raises:
        OSError: the file exists, or not all of it can be written.
    """
    write_parts(path, sealed(lines, _last_line))


def _last_line(checksum: str) -> bytes:
    """Return the last line of a manifest: the checksum of all bytes before it."""
    return f'"checksum": "{checksum}"}}\n'.encode()


def read_manifest(path: Path) -> Manifest | None:
    """Read a manifest; None if there is none, or it belongs to another program or a later version.

    Raises:
        UnreadableCheckpoint: it is damaged, or not a regular file.
    """
    return _read(path, _parsed)


def checksum_of(path: Path) -> str | None:
    """Return the checksum of a manifest, proven against its lines; these are not parsed.

    Errors, and None, are those of `read_manifest`.
    """
    return _read(path, _checksum)


def _read(path: Path, taken: Callable[[Path, BufferedReader], Taken]) -> Taken | None:
    """Open a manifest and return what `taken` makes of it; None and errors are those of `read_manifest`."""
    try:
        with open_file(path) as file:
            if size_of(handle_of(file)) > Limit.MANIFEST.nbytes:
                raise Unfit(path, "it is too large")
            begins = BEGINNING.match(file.peek(HEAD))
            if begins is not None and int(begins[1]) == FORMAT:
                return taken(path, file)
        if begins is None:
            _refuse_damaged(path, content_of(path, Limit.MANIFEST))
    except FileNotFoundError:
        return None
    except (Unfit, IsADirectoryError) as error:
        largest = Limit.MANIFEST.nbytes
        raise UnreadableCheckpoint(f"`{path}` is no file of at most {largest:,} bytes", hint=CHANGED_HINT) from error
    except OSError as error:
        raise open_error(path, error) from error
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise _damaged(path) from error
    return None


def _checksum(path: Path, file: BufferedReader) -> str:
    lines = Unsealed(file, CHECKSUM)
    for _ in lines:
        pass
    return lines.checksum


def _refuse_damaged(path: Path, text: bytes) -> None:
    """Refuse a file that does not begin like a manifest, unless it belongs to another program or a later version."""
    try:
        content = parsed(text, any_string=True)
    except (ValueError, RecursionError) as error:
        raise _damaged(path) from error
    if isinstance(content, dict) and (type(content.get("manifest", 0)) is not int or content.get("manifest") == FORMAT):
        raise _damaged(path)


def _damaged(path: Path) -> UnreadableCheckpoint:
    return UnreadableCheckpoint(
        f"`{path}` is damaged, so it cannot say whether the checkpoint is",
        hint=f"copy it again, or remove it to read the checkpoint without a `{MANIFEST}`",
    )


def _entries(path: Path, lines: Iterable[bytes]) -> Iterator[tuple[str, str, Any]]:
    """Yield the entries of a manifest: section (none for facts), name and value.

    They are read line by line, as they were written: neither all entries together nor the objects that Python builds
    while it parses them are in memory at once.

    Raises:
        UnreadableCheckpoint: the entries would take more memory than any manifest in use does.
    """
    section, kept = "", 0
    for number, line in enumerate(lines):
        line = line if number else line[1:]
        if line == b"}," and section:
            section = ""
        elif not section and line.endswith(b": {"):
            section = str(json.loads(line.removesuffix(b": {")))
        else:
            text = b"{" + line.removesuffix(b",") + b"}"
            kept += KEPT + 2 * len(line) + KEPT_STRING // 2 * line.count(b'"') if section else cost_of(text)
            if kept > MEMORY:
                raise UnreadableCheckpoint(
                    f"`{path}` would take more than {MEMORY:,} bytes of memory", hint=CHANGED_HINT
                )
            ((name, value),) = parsed(text, any_string=True).items()
            yield section, name, value


def _parsed(path: Path, file: BufferedReader) -> Manifest:
    """Return the parsed manifest.

    Raises:
        KeyError, TypeError, ValueError, AttributeError, RecursionError: it is damaged.
        UnreadableCheckpoint: it would take too much memory.
    """
    facts: dict[str, Any] = {}
    files: dict[str, File] = {}
    headers: dict[str, TensorMeta] = {}
    own: dict[str, TensorMeta] = {}  # the tensors as a reader sees them, for formats that use their own names
    parts: list[Part] = []
    lines = Unsealed(file, CHECKSUM)
    for section, name, value in _entries(path, lines):
        if section == "files":
            files[name] = File(int(value["size"]), value.get("rest"))
        elif section == "headers":
            headers[name] = TensorMeta(tuple(map(int, value[1])), str(value[0]))
        elif section == "tensors":
            own[name] = TensorMeta(tuple(map(int, value["shape"])), str(value["dtype"]))
            parts += _parts(name, value["parts"], files, int(facts["checksums"]["block"]))
        else:
            facts[name] = value
    if not all(map(is_inside, files)):
        raise ValueError("a file lies outside")
    block, version = int(facts["checksums"]["block"]), str(facts["mcore_convert"])
    if block < 1:
        raise ValueError("blocks without bytes")
    return Manifest(path, version, files, headers or own, tuple(parts), len(own), block, lines.checksum)


def _parts(name: str, entries: Iterable[Mapping[str, Any]], files: Mapping[str, File], block: int) -> Iterator[Part]:
    """Yield the parts of a tensor; each lies within its file and has one checksum per block, or none."""
    for entry in entries:
        start, end = map(int, entry["bytes"])
        if not 0 <= start <= end <= files[entry["file"]].size:
            raise ValueError("a tensor lies outside of its file")
        sums = tuple(map(str, entry.get("sums", ())))
        if sums and len(sums) != -(-(end - start) // block):
            raise ValueError("a tensor has another number of blocks")
        yield Part(name, entry["file"], start, end, sums)


def check_manifest(checkpoint: Checkpoint) -> None:
    """Prove from sizes and headers that an open checkpoint matches its manifest, if it has one.

    Files that hold no tensor may be edited, and are not checked here.

    Raises:
        UnreadableCheckpoint: it does not match, or the manifest is damaged.
    """
    path = checkpoint.path / MANIFEST
    manifest = read_manifest(path) if checkpoint.path.is_dir() else None
    if manifest is None:
        return
    problems = [*sizes_that_differ(manifest, {part.file for part in manifest.parts})]
    if problems:
        checkpoint.check_whole()  # the format itself has the best message for missing or short files
    headers = checkpoint.headers
    for name in {**manifest.headers, **headers}:
        if name not in headers:
            problems.append(f"{name}: not there")
        elif name not in manifest.headers:
            problems.append(f"{name}: not in the manifest")
        elif manifest.headers[name] != headers[name]:
            was, now = manifest.headers[name], headers[name]
            problems.append(f"{name}: {now.dtype} {list(now.shape)}, and not {was.dtype} {list(was.shape)}")
    if not problems:
        problems += _elsewhere(manifest, checkpoint.whole_views)
    if problems:
        raise UnreadableCheckpoint(
            f"`{checkpoint.path}` is not what its manifest says: it was changed after it was written",
            items=fold(problems),
            hint=CHANGED_HINT,
        )


def sizes_that_differ(manifest: Manifest, names: Iterable[str]) -> Iterator[str]:
    """Yield the files that are missing, or whose size differs from the manifest, one line each."""
    for name in sorted(names):
        try:
            size = (manifest.folder / name).stat().st_size
        except FileNotFoundError:
            yield f"{name}: not there"
            continue
        if size != manifest.files[name].size:
            yield f"{name}: {size:,} bytes, and not {manifest.files[name].size:,}"


def _elsewhere(manifest: Manifest, views: Mapping[str, View]) -> Iterator[str]:
    """Yield the tensors that lie elsewhere in a file than where they were written."""
    paths = {name: manifest.folder / name for name in manifest.files}
    for part in manifest.parts:
        view = views.get(part.tensor)
        if view is not None and view.nbytes and (view.offset != part.start or view.path != paths[part.file]):
            yield f"{part.tensor}: at byte {view.offset:,} of {view.path.name}, and not {part.start:,} of {part.file}"
