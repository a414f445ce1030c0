"""Work that makes many objects leaves Python nothing to search, and nothing that only a search would free."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch

from mcore_convert.formats.files.torch_archive import TorchFile
from mcore_convert.storage.collection import without_collection


@pytest.fixture(autouse=True)
def nothing_frozen() -> None:
    gc.unfreeze()  # what tests with ranks have


def test_what_a_scope_has_made_counts_as_old() -> None:
    with without_collection():
        assert not gc.isenabled()
        made = [[number] for number in range(20_000)]
    assert gc.isenabled()
    old = {id(each) for each in gc.get_objects(generation=2)}
    assert all(id(each) in old for each in made)
    assert not gc.get_freeze_count()


def test_what_a_caller_has_frozen_stays_so() -> None:
    gc.freeze()
    try:
        with without_collection():
            made = [[number] for number in range(20_000)]
        assert gc.get_freeze_count()
        assert made
    finally:
        gc.unfreeze()


def test_an_opened_file_is_freed_with_its_last_reference(tmp_path: Path) -> None:
    """While Python collects no cycles, those of all rank files of a checkpoint would stay in memory."""
    path = tmp_path / "model.pt"
    torch.save({"a": [torch.ones(2), (torch.zeros(3),)]}, path)
    with without_collection():
        opened = weakref.ref(TorchFile(path))
        assert opened() is None
