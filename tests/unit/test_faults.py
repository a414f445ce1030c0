"""Whatever one call to the file system answers: the output is what it should be, or there is none and an error says so.

`FAULTS_EACH=20` in the environment tries each fault at that many calls of its function, over more commands.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from mcore_convert import convert, verify
from mcore_convert.errors import UnreadableCheckpoint
from mcore_convert.storage.disk import copy_range, write_at
from tests.conftest import HfMaker
from tests.faults import FAULTS, Fault, counted, every_fault
from tests.refusals import Ended, run, tree

EACH = int(os.environ.get("FAULTS_EACH", "0"))


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory, hf_checkpoint: HfMaker) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sources")
    made = hf_checkpoint("gpt2", tokenizer=False)  # transposed tensors, and fused ones
    shutil.copytree(made, folder / "hf")
    assert run("convert", folder / "hf", folder / "dist", "--tp", "2").code == 0
    assert run("convert", folder / "hf", folder / "ranks", "--to", "torch", "--tp", "2").code == 0
    return {path.name: path for path in folder.iterdir()}


COMMANDS: dict[str, tuple[str, ...]] = {
    "hf to torch_dist": ("convert", "@hf", "DST", "--tp", "2", "--tokenizer", "t"),
    "hf to torch": ("convert", "@hf", "DST", "--to", "torch", "--tp", "2", "--tokenizer", "t"),
    "torch_dist to hf": ("convert", "@dist", "DST", "--to", "hf"),
    "torch to torch_dist": ("convert", "@ranks", "DST", "--to", "torch_dist", "--tokenizer", "t"),
    "export in bf16": ("export", "@dist", "DST", "--dtype", "bfloat16", "--no-tokenizer"),
}


ALWAYS = ("hf to torch", "export in bf16")


def attempted(words: tuple[str, ...], sources: dict[str, Path], destination: Path) -> Ended:
    places = {f"@{name}": path for name, path in sources.items()} | {"DST": destination}
    return run(*(places.get(word, word) for word in words))


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_each_fault(command: str, sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if command not in ALWAYS and not EACH:
        pytest.skip("takes longer: set FAULTS_EACH")
    monkeypatch.setattr("mcore_convert.storage.threads.WORKERS", 1)  # so that the n-th call is always the same one
    home = tmp_path / "home"
    home.mkdir()
    before = {name: tree(path) for name, path in sources.items()}
    with counted() as calls:
        assert attempted(COMMANDS[command], sources, home / "DST").code == 0
    whole = tree(home / "DST")
    shutil.rmtree(home / "DST")
    refused = 0
    for fault in every_fault(calls, EACH or 1):
        with counted(fault):
            ended = attempted(COMMANDS[command], sources, home / "DST")
        after = tree(home)
        if ended.code == 0:
            assert tree(home / "DST") == whole, fault
            shutil.rmtree(home / "DST")
        else:
            refused += 1
            assert ended.code == 1, (fault, ended)
            assert ended.err.startswith("error: "), (fault, ended)
            stands = "DST" in after
            assert not stands or tree(home / "DST") == whole, fault
            for left in home.iterdir():
                shutil.rmtree(left) if left.is_dir() else left.unlink()
            assert set(after) <= {"DST", *(f"DST/{name}" for name in whole)}, (fault, sorted(after))
        assert {name: tree(path) for name, path in sources.items()} == before, fault
    assert refused > 10


@pytest.mark.parametrize("how", ["shrinks", "grows", "is written", "is replaced", "is removed"])
@pytest.mark.parametrize("to", ["torch_dist", "torch"])
def test_a_source_that_changes_while_it_is_read(how: str, to: str, sources: dict[str, Path], tmp_path: Path) -> None:
    """As by a run that writes there: an error with the file's name, and no signal from a memory map."""
    source = Path(shutil.copytree(sources["hf"], tmp_path / "SRC"))
    file = source / "model.safetensors"

    def change(done: int, total: int) -> None:
        if how == "shrinks":
            os.truncate(file, 0)
        elif how == "grows":
            os.truncate(file, file.stat().st_size + 1)
        elif how == "is written":
            with file.open("r+b") as opened:
                opened.seek(-1, os.SEEK_END)
                opened.write(b"x")
        elif how == "is replaced":
            shutil.copyfile(file, tmp_path / "other")
            (tmp_path / "other").rename(file)
        else:
            file.unlink(missing_ok=True)

    with pytest.raises(UnreadableCheckpoint) as caught:
        convert(source, tmp_path / "DST", to=to, tp=2, progress=change)
    assert str(file) in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["SRC"]


def test_a_source_that_shrinks_while_it_is_compared(sources: dict[str, Path], tmp_path: Path) -> None:
    mine, theirs = (Path(shutil.copytree(sources["hf"], tmp_path / name)) for name in "ab")
    file = theirs / "model.safetensors"
    with pytest.raises(UnreadableCheckpoint, match="became shorter while it was read"):
        verify(mine, theirs, progress=lambda *_: os.truncate(file, 0))


def test_a_write_that_writes_nothing_is_an_error(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w+b") as file:
        with counted(Fault("pwrite", 0, "zero")), pytest.raises(OSError, match="wrote nothing"):
            write_at(file.fileno(), b"content", 0)
        with counted(Fault("pwrite", 0, "short")):
            write_at(file.fileno(), b"content", 3)
        assert file.read() == b"\0\0\0content"


@pytest.mark.parametrize("kind", FAULTS["copy_file_range"][2:])
def test_a_copy_that_the_kernel_does_not_make(kind: str, tmp_path: Path) -> None:
    content = os.urandom(1000)
    (tmp_path / "a").write_bytes(content)
    with (tmp_path / "a").open("rb") as a, (tmp_path / "b").open("w+b") as b:
        with counted(Fault("copy_file_range", 0, kind)):
            copy_range(a.fileno(), tmp_path / "a", 100, b.fileno(), 0, 800)
        assert b.read() == content[100:900]
        with pytest.raises(OSError, match="became shorter"):
            copy_range(a.fileno(), tmp_path / "a", 900, b.fileno(), 0, 101)
