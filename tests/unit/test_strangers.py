"""Neighbours of a destination: only what the tool has marked as its own is cleared or renamed, even after a kill."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from mcore_convert import convert
from mcore_convert.errors import UnwritableTarget
from mcore_convert.inspection.page.render import write_page
from mcore_convert.storage.destination import claimed, partial_path
from mcore_convert.storage.disk import write_whole
from mcore_convert.storage.marker import HINT, MARKER, finished_name, new_id, record_bytes, unfinished
from tests.conftest import HfMaker
from tests.refusals import refusal, run, tree
from tests.unit.test_destination import a_dangling_link, a_file, an_empty_directory
from train_entry.checkpoints.source import START, forget
from train_entry.config.schema import Config


@pytest.fixture
def source(tmp_path: Path, hf_checkpoint: HfMaker) -> Path:
    made = hf_checkpoint("llama-gqa", tokenizer=False, config={"num_hidden_layers": 2})
    return Path(shutil.copytree(made, tmp_path / "SRC"))


def a_directory(path: Path) -> None:
    path.mkdir()
    (path / "mine.txt").write_text("mine")


def a_link(path: Path) -> None:
    path.symlink_to("SRC")


def one_with_a_foreign_marker(path: Path) -> None:
    path.mkdir()
    (path / MARKER).write_text(json.dumps({"tool": "another", "id": new_id()}))


def one_with_a_linked_marker(path: Path) -> None:
    (path.parent / "record").write_bytes(record_bytes(new_id()))
    path.mkdir()
    (path / MARKER).symlink_to("../record")


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


THEIRS = [
    a_file,
    an_empty_directory,
    a_directory,
    a_link,
    a_dangling_link,
    one_with_a_foreign_marker,
    one_with_a_linked_marker,
]


@pytest.mark.parametrize("options", [[], ["--overwrite"]], ids=["new", "overwrite"])
@pytest.mark.parametrize("make", THEIRS)
def test_what_no_conversion_left_is_refused(
    make: Callable[[Path], None], options: list[str], source: Path, tmp_path: Path
) -> None:
    make(tmp_path / "DST.partial")
    message = f"error: `DST.partial` is in the way, and no conversion left it\nhint: {HINT}\n"
    assert refusal(source, *options) == message


@pytest.mark.parametrize("make", [a_file, an_empty_directory, a_directory, a_link, a_dangling_link])
def test_a_lock_that_is_none_is_refused(make: Callable[[Path], None], source: Path, tmp_path: Path) -> None:
    make(tmp_path / "DST.partial.lock")
    message = f"error: `DST.partial.lock` is in the way, and no conversion left it\nhint: {HINT}\n"
    assert refusal(source) == message


def test_a_pipe_in_the_place_of_a_lock_is_refused(source: Path, tmp_path: Path) -> None:
    a_pipe(tmp_path / "DST.partial.lock")
    with pytest.raises(UnwritableTarget, match="is in the way, and no conversion left it"):
        convert(source, tmp_path / "DST")


@pytest.mark.parametrize("name", ["DST.partial.old", "DST.old", "DST.partial.lock.old", f"DST.partial.old-{32 * '0'}"])
def test_neighbours_stay(name: str, source: Path, tmp_path: Path) -> None:
    a_directory(tmp_path / name)
    a_directory(tmp_path / "DST")
    assert run("convert", source, tmp_path / "DST", "--overwrite").code == 0
    assert tree(tmp_path / name) == {"mine.txt": b"mine"}


@pytest.mark.parametrize("name", ["DST.partial", "DST.partial.old", "DST.partial.lock"])
@pytest.mark.parametrize("options", [[], ["--overwrite"]], ids=["new", "overwrite"])
def test_a_source_in_the_way_is_kept(name: str, options: list[str], source: Path, tmp_path: Path) -> None:
    moved = source.rename(tmp_path / name)
    before = tree(moved)
    ended = run("convert", moved, tmp_path / "DST", *options)
    assert ended.code == (0 if name.endswith(".old") else 1)
    assert tree(moved) == before


def test_an_unfinished_conversion_is_no_room_for_its_own_source(source: Path, tmp_path: Path) -> None:
    """Even where it is marked as ours, a source is not cleared."""
    moved = source.rename(tmp_path / "DST.partial")
    (moved / MARKER).write_bytes(record_bytes(new_id()))
    before = tree(moved)
    assert "lie in one another" in run("convert", moved, tmp_path / "DST").err
    assert tree(moved) == before


def test_the_marker_is_there_while_it_writes_and_never_after(source: Path, tmp_path: Path) -> None:
    seen: list[bool] = []
    convert(source, tmp_path / "DST", progress=lambda *_: seen.append((tmp_path / "DST.partial" / MARKER).is_file()))
    assert set(seen) == {True}
    assert not list(tmp_path.rglob(f"*{MARKER}*"))


CHANGES = ("rename", "mkdir", "unlink", "rmdir", "pwrite", "fsync", "open", "truncate", "copy_file_range")


@pytest.mark.slow
@pytest.mark.parametrize("there", [False, True], ids=["new", "overwrite"])
def test_killed_at_each_change(there: bool, tmp_path: Path) -> None:
    """The destination is the old one or the new one at any moment, and the next run goes on without a hand."""
    home = tmp_path / "home"
    moment = 0
    seen = set()
    while True:
        home.mkdir()
        destination = home / "DST"
        if there:
            a_directory(destination)
        process = os.fork()
        if process == 0:
            left = moment

            def kill(_: object, event: str, function: object) -> None:
                nonlocal left
                left -= event == "c_call" and getattr(function, "__name__", "") in CHANGES
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

            with mock.patch("os.fsync"):
                sys.setprofile(kill)
                with claimed(destination, 0, overwrite=there) as claim:
                    (claim.partial / "mine.txt").write_text("new")
                    claim.publish()
                sys.setprofile(None)
            os._exit(0)
        _, status = os.waitpid(process, 0)
        state = (destination / "mine.txt").read_text() if destination.exists() else None
        assert state in ("mine" if there else None, "new", None if there else "new")
        assert not (destination / MARKER).exists()
        seen.add(state)
        if os.WIFEXITED(status):
            break
        before = sorted(path.name for path in home.iterdir())
        with claimed(destination, 0, overwrite=True) as claim:
            (claim.partial / "other.txt").write_text("other")
            claim.publish()
        assert tree(destination) == {"other.txt": b"other"}, before
        assert [path.name for path in home.iterdir()] == ["DST"], before
        shutil.rmtree(home)
        moment += 1
    assert moment > 12
    assert seen == ({"mine", "new", None} if there else {None, "new"})


@pytest.mark.slow
def test_a_kill_in_the_exchange_gives_the_old_one_back(source: Path, tmp_path: Path) -> None:
    """Between two renames the old one has another name: the next run, even one that is refused, gives it back."""
    a_directory(tmp_path / "DST")
    process = os.fork()
    if process == 0:
        with claimed(tmp_path / "DST", 0, overwrite=True) as claim:
            (claim.partial / "new.txt").write_text("new")
            rename = Path.rename

            def once(path: Path, to: Path) -> Path:
                rename(path, to)
                os.kill(os.getpid(), signal.SIGKILL)
                return to

            with mock.patch.object(Path, "rename", once):
                claim.publish()
    os.waitpid(process, 0)
    assert not (tmp_path / "DST").exists()
    ended = run("convert", source, tmp_path / "DST")
    assert (ended.code, ended.err.splitlines()[0]) == (1, f"error: `{tmp_path / 'DST'}` exists")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["DST", "SRC"]
    assert tree(tmp_path / "DST") == {"mine.txt": b"mine"}


def test_nothing_is_replaced_that_appeared_meanwhile(tmp_path: Path) -> None:
    def publish() -> None:
        with claimed(tmp_path / "DST", 0, overwrite=False) as claim:
            (claim.partial / "new.txt").write_text("new")
            a_directory(tmp_path / "DST")
            claim.publish()

    with pytest.raises(OSError, match="not empty"):
        publish()
    assert tree(tmp_path) == {"DST": None, "DST/mine.txt": b"mine"}


def test_a_file_beside_a_page_stays(tmp_path: Path) -> None:
    a_file(tmp_path / "page.html.partial")
    write_page(tmp_path / "page.html", "text")
    assert tree(tmp_path) == {"page.html": b"text", "page.html.partial": b"mine"}


def test_a_killed_file_is_cleared_and_a_living_one_is_not(tmp_path: Path) -> None:
    dead, alive = (unfinished(tmp_path / "page.html", new_id()) for _ in range(2))
    dead.write_text("")
    rename = Path.replace

    def meanwhile(path: Path, to: Path) -> Path:
        assert not dead.exists()
        with mock.patch.object(Path, "replace", rename):
            write_whole(tmp_path / "page.html", b"theirs")
        assert path.exists()
        return rename(path, to)

    with mock.patch.object(Path, "replace", meanwhile):
        write_whole(tmp_path / "page.html", b"text")
    assert tree(tmp_path) == {"page.html": b"text"}
    assert finished_name(alive) == tmp_path / "page.html"
    assert finished_name(partial_path(alive)) is None


def test_what_a_killed_start_of_training_left_is_removed_alone(tmp_path: Path) -> None:
    left, another = (unfinished(tmp_path / name, new_id()) for name in (START, "other"))
    theirs = [another, *(tmp_path / name for name in (START, f"{START}.partial", f"{START}.removed"))]
    for path in (left, *theirs):
        a_directory(path)
    forget(Config(run_dir=tmp_path))
    assert sorted(tmp_path.iterdir()) == sorted(theirs)
    assert all((path / "mine.txt").read_text() == "mine" for path in theirs)
    forget(Config(run_dir=tmp_path / "not begun"))
    assert not (tmp_path / "not begun").exists()
