"""A crash at any moment, after which what was not synced is gone: nothing looks whole and is not."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import numpy as np
import pytest

from mcore_convert.formats.megatron.run_directory import TRACKER
from mcore_convert.storage.disk import write_new, write_whole
from mcore_convert.storage.marker import new_id
from tests.crashes import Disk, crashing
from tests.fuzz.mutations import CORPUS
from tests.refusals import run
from train_entry.checkpoints.folder import begin, complete, iteration_path
from train_entry.data.bin_idx import SUFFIXES, PairWriter
from train_entry.data.prepare import publish_all

COMMANDS = {
    "hf to torch_dist": ("hf", "convert", "--tp", "2"),
    "hf to torch": ("hf", "convert", "--to", "torch", "--tp", "2"),
    "torch_dist to hf": ("dist", "convert"),
    "with optimizer state": ("dist_state", "reshard", "--tp", "2"),
    "of ranks": ("ranks_plain", "reshard", "--tp", "1"),
    "of zarr": ("zarr", "reshard", "--tp", "2"),
    "export": ("dist", "export", "--no-tokenizer"),
    "over another": ("hf", "convert", "--overwrite"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_destination_is_on_the_disk_before_it_has_its_name(command: str, tmp_path: Path) -> None:
    name, verb, *options = COMMANDS[command]
    with zipfile.ZipFile(CORPUS / "checkpoints" / f"{name}.zip") as archive:
        archive.extractall(tmp_path / "SRC")
    final = tmp_path / "DST"
    if "--overwrite" in options:
        final.mkdir()
    before = _number(final)
    stood: list[bool] = []

    def check(disk: Disk) -> None:
        if final.exists() and _number(final) != before:  # what it replaces was somebody else's to sync
            assert disk.lost(final) == []
            stood.append(True)

    with crashing(check) as disk:
        ended = run(verb, tmp_path / "SRC", final, *options)
    assert ended.code == 0, ended
    assert len(stood) > 1
    assert disk.moments > 10
    assert disk.lost(final) == []


def _number(path: Path) -> int | None:
    return path.stat().st_ino if path.exists() else None


def test_prepared_data_are_on_the_disk_before_they_have_their_names(tmp_path: Path) -> None:
    prefix = tmp_path / "data"

    def check(disk: Disk) -> None:
        for suffix in SUFFIXES:
            assert disk.lost(Path(f"{prefix}{suffix}")) == []
        if Path(f"{prefix}.idx").exists():
            assert all(Path(f"{prefix}{suffix}").exists() for suffix in SUFFIXES)

    with crashing(check) as disk:
        writer = PairWriter(str(prefix), "uint16", new_id())
        writer.add(np.arange(5, dtype=np.uint16), np.array([3, 2], np.int32))
        writer.complete()
        writer.partial(".json").write_text("{}")
        publish_all([writer])
    assert disk.lost(tmp_path) == []
    assert sorted(path.suffix for path in tmp_path.iterdir()) == sorted(SUFFIXES)


def test_a_checkpoint_of_training_is_on_the_disk_before_it_has_its_name(tmp_path: Path) -> None:
    def check(disk: Disk) -> None:
        for final in tmp_path.glob("iter_???????"):
            assert disk.lost(final) == []
        tracker = tmp_path / TRACKER
        assert disk.lost(tracker) == []
        if tracker.exists():
            assert iteration_path(tmp_path, int(tracker.read_text())).is_dir()

    with crashing(check):
        for iteration in (10, 20, 30):
            partial = begin(iteration_path(tmp_path, iteration))
            write_new(partial / "__0_0.distcp", b"tensors")
            complete(partial, {"common.pt": b"state", "hf/config.json": b"{}"}, keep_last=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000030", TRACKER]  # what is lost is a removal


def test_a_file_is_old_or_new(tmp_path: Path) -> None:
    file = tmp_path / "x"
    with crashing(lambda disk: None) as disk:
        write_whole(file, b"old")

        def check() -> None:
            assert file.read_bytes() in (b"old", b"new")
            assert disk.lost(file) == []

        check()
        write_whole(file, b"new")
        check()


def test_the_disk_loses_what_was_not_synced(tmp_path: Path) -> None:
    """Or the tests above would say nothing."""
    with crashing(lambda disk: None) as disk:
        (tmp_path / "folder").mkdir()
        file = tmp_path / "folder" / "x"
        file.write_bytes(b"content")
        assert disk.lost(tmp_path / "folder") == [str(tmp_path / "folder"), str(file)]
        with file.open("r+b") as opened:
            os.fsync(opened.fileno())
        assert disk.lost(tmp_path / "folder") == [str(tmp_path / "folder")]
        file.write_bytes(b"changed")
        assert str(file) in disk.lost(tmp_path / "folder")
