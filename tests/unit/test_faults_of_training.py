"""Remains of prepared data and of checkpoints of training after one failing call to the file system."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mcore_convert.formats.megatron.run_directory import TRACKER
from mcore_convert.storage.disk import write_new
from mcore_convert.storage.marker import finished_name, new_id
from tests.faults import counted, every_fault
from tests.refusals import tree
from train_entry.checkpoints.folder import begin, clean, complete, iteration_path
from train_entry.data.bin_idx import SUFFIXES, PairWriter
from train_entry.data.prepare import publish_all

EACH = int(os.environ.get("FAULTS_EACH", "3"))
FILES = {"__0_0.distcp": b"tensors", "common.pt": b"state", "hf/config.json": b"{}"}


def prepared(home: Path) -> None:
    writer = PairWriter(str(home / "data"), "uint16", new_id())
    try:
        writer.add(np.arange(5, dtype=np.uint16), np.array([3, 2], np.int32))
        writer.complete()
        writer.partial(".json").write_text("{}")
        publish_all([writer])
    finally:
        writer.discard()


def trained(home: Path) -> None:
    for iteration in (10, 20):
        partial = begin(iteration_path(home, iteration))
        write_new(partial / "__0_0.distcp", FILES["__0_0.distcp"])
        complete(partial, {name: FILES[name] for name in ("common.pt", "hf/config.json")}, keep_last=1)


def check_prepared(home: Path, whole: dict[str, bytes | str | None]) -> None:
    left = tree(home)
    assert set(left) <= {f"data{suffix}" for suffix in SUFFIXES}
    assert all(whole[name] == content for name, content in left.items())
    assert "data.idx" not in left or left == whole


def check_trained(home: Path, whole: dict[str, bytes | str | None]) -> None:
    for path in home.iterdir():
        if path.name.startswith("iter_") and finished_name(path) is None:
            assert {name: content for name, content in tree(path).items() if content is not None} == FILES
    if (home / TRACKER).exists():
        assert iteration_path(home, int((home / TRACKER).read_text())).is_dir()
    clean(home)  # as the next start does
    assert {path.name for path in home.iterdir()} <= {"iter_0000010", "iter_0000020", TRACKER}


@pytest.mark.parametrize(("action", "check"), [(prepared, check_prepared), (trained, check_trained)])
def test_each_fault(
    action: Callable[[Path], None], check: Callable[[Path, dict[str, bytes | str | None]], None], tmp_path: Path
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    with counted() as calls:
        action(home)
    whole = tree(home)
    ends: Counter[str] = Counter()
    for fault in every_fault(calls, EACH):
        shutil.rmtree(home)
        home.mkdir()
        try:
            with counted(fault):
                action(home)
        except OSError:
            ends["refused"] += 1
            check(home, whole)
        else:
            ends["whole"] += 1
            assert tree(home) == whole, fault
    assert ends["refused"] > 10
