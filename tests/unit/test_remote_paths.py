"""Paths in remote stores and ranges of their files, by themselves."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PosixPath
from typing import Any

import fsspec
import pytest

from mcore_convert.errors import ConvertError
from mcore_convert.storage import asking
from mcore_convert.storage.ranges import Cache, Ranges
from mcore_convert.storage.remote import RemotePath, located
from mcore_convert.storage.sources import Limit, content_of, open_file, stamp_of

numbers = itertools.count()


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[RemotePath]:
    """A directory with files of 0 to 9 thousand bytes, and one in a directory of its own."""
    monkeypatch.setattr(asking, "FIRST_WAIT", 0)
    fs = fsspec.filesystem("memory")
    name = f"/remote-paths/{next(numbers)}/top"
    for number in range(10):
        fs.pipe_file(f"{name}/x{number}", random.Random(number).randbytes(1000 * number))
    fs.pipe_file(f"{name}/iter_1/deep/y", b"y")
    path = located(f"memory:/{name}")
    assert isinstance(path, RemotePath)
    yield path
    fs.rm("/remote-paths", recursive=True)


def test_it_is_a_path(folder: RemotePath) -> None:
    file = folder / "iter_1" / "deep/y"
    assert str(file) == f"{folder}/iter_1/deep/y" == f"{file}"
    assert str(folder).startswith("memory://remote-paths/")
    assert (file.name, file.parent.name, file.suffix) == ("y", "deep", "")
    assert isinstance(file.with_name("z.json").with_suffix(".txt"), RemotePath)
    assert file.with_name("z") == folder / "iter_1/deep/z"
    assert type(file.relative_to(folder)) is PosixPath
    assert str(file.relative_to(folder)) == "iter_1/deep/y"
    assert Path("/here") / file.relative_to(folder) == Path("/here/iter_1/deep/y")
    assert type(folder / "/etc/passwd") is PosixPath
    assert file.is_relative_to(folder)
    assert sorted([folder / "b", folder / "a"]) == [folder / "a", folder / "b"]
    assert len({folder / "a", folder / "a"}) == 1
    assert (folder / "a").resolve() == (folder / "a").absolute() == folder / "a"
    top = RemotePath("memory://remote-paths")
    assert folder.parents[-1] == top == top.parent
    assert located(Path(str(folder))) == folder  # where a slash has gone
    assert type(located("/etc")) is type(located(Path("a/b"))) is type(located("file:///etc")) is PosixPath


def test_it_lists(folder: RemotePath) -> None:
    assert folder.is_dir()
    assert [path.name for path in folder.iterdir()] == ["iter_1", *(f"x{number}" for number in range(10))]
    assert [path.name for path in folder.glob("x[12]")] == ["x1", "x2"]
    assert list(folder.glob("iter_*/deep")) == [folder / "iter_1/deep"]
    assert list(folder.rglob("y")) == [folder / "iter_1/deep/y"]
    assert not list((folder / "none").glob("*"))
    assert (folder / "x3").stat().st_size == 3000
    assert (folder / "x3").is_file()
    assert not (folder / "x3").is_dir()
    assert not (folder / "x3" / "z").exists()
    assert not (folder / "none" / "z").exists()
    with pytest.raises(FileNotFoundError, match="none"):
        (folder / "none").stat()


def test_one_listing_answers_for_a_directory(folder: RemotePath, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    kind: Any = type(folder.store.fs)
    real = kind.ls

    def ls(self: object, path: str, **options: object) -> object:
        asked.append(path)
        return real(self, path, **options)

    monkeypatch.setattr(kind, "ls", ls)
    fresh = located(str(folder))
    assert all((fresh / f"x{number}").is_file() for number in range(10))
    assert not any((fresh / f"z{number}" / "a" / "b").exists() for number in range(10))
    assert len(asked) == 1


@pytest.mark.parametrize("name", ["mkdir", "unlink", "rmdir", "touch", "open"])
def test_what_it_cannot_is_refused(name: str, folder: RemotePath) -> None:
    with pytest.raises(OSError, match="a remote store cannot do this"):
        getattr(folder / "new", name)()
    assert not Path("memory:").exists()


def test_a_stamp_tells_of_another_content(folder: RemotePath) -> None:
    before = stamp_of((folder / "x3").stat())
    assert stamp_of((located(str(folder)) / "x3").stat()) == before
    folder.store.fs.pipe_file((folder / "x3").key, bytes(3000))
    assert stamp_of((located(str(folder)) / "x3").stat()) != before


def test_what_is_read_whole(folder: RemotePath) -> None:
    assert content_of(folder / "x9", Limit.JSON) == random.Random(9).randbytes(9000)
    assert content_of(folder / "x0", Limit.JSON) == b""
    with open_file(folder / "x9") as file:
        file.seek(-4, 2)
        assert file.read() == random.Random(9).randbytes(9000)[-4:]
    with pytest.raises(IsADirectoryError):
        open_file(folder / "iter_1")


def test_a_name_that_fsspec_does_not_know() -> None:
    with pytest.raises(ConvertError, match="`nosuch://a/b` cannot be reached"):
        located("nosuch://a/b")


class Counted(Ranges):
    """A file whose requests are counted; every third of them is cut."""

    def __init__(self, path: RemotePath, cache: Cache, cut: int = 0) -> None:
        super().__init__(path, cache)
        self.asked: list[tuple[int, int]] = []
        self.calls, self.cut = itertools.count(1), cut

    def _read(self, start: int, stop: int) -> bytes:
        if self.cut and next(self.calls) % self.cut == 0:
            raise ConnectionResetError("cut by the test")
        self.asked.append((start, stop))
        return super()._read(start, stop)


@pytest.fixture
def content(folder: RemotePath) -> bytes:
    whole = random.Random(0).randbytes(300_000)
    folder.store.fs.pipe_file((folder / "large").key, whole)
    folder.store.listings.clear()
    return whole


@pytest.mark.parametrize("seed", range(5))
def test_ranges_in_any_order(seed: int, folder: RemotePath, content: bytes) -> None:
    """From many threads, with a cache that holds a tenth of the file, and lost connections."""
    draw = random.Random(seed)
    file = Counted(folder / "large", Cache(1024, 30_000, ahead=draw.choice([0, 8192])), cut=3)

    def read(place: tuple[int, int]) -> bool:
        at, count = place
        into = bytearray(count)
        assert file.read_at(memoryview(into), at) == min(count, len(content) - at)
        return bytes(into)[: len(content) - at] == content[at : at + count]

    places = [(draw.randrange(len(content)), draw.randrange(1, 50_000)) for _ in range(60)]
    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(read, places))


def test_reading_on_asks_for_more_at_once(folder: RemotePath, content: bytes) -> None:
    cache = Cache(1024, 2**20, ahead=65_536)
    file = Counted(folder / "large", cache)
    assert b"".join(iter(lambda: file.read(500), b"")) == content
    assert len(file.asked) < 30  # of 300 blocks
    assert sum(stop - start for start, stop in file.asked) == len(content)
    file.expect([5, 2**30])
    assert len(file.asked) < 30  # of 300 blocks
    held = Counted(folder / "large", cache)
    assert held.read(100) == content[:100]
    assert not held.asked
    alone = Counted(folder / "large", Cache(1024, 2**20, ahead=65_536))
    assert alone.read(8) == content[:8]
    assert alone.asked == [(0, 1024)]  # a header of a few bytes costs no more


def test_a_connection_that_stays_lost(folder: RemotePath, content: bytes) -> None:
    file = Counted(folder / "large", Cache(1024, 2**20, ahead=0), cut=1)
    with pytest.raises(OSError, match="cut by the test") as refused:
        file.read(10)
    assert refused.value.filename == str(folder / "large")
    file.cut = 0
    assert file.read(10) == content[:10]  # the failure is not kept
