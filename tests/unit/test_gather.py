"""Strided elements read with few system calls are those that a memory map shows."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from mcore_convert.conversion.beside import copy_together, together
from mcore_convert.conversion.plan import Copy
from mcore_convert.storage.disk import Shrunk
from mcore_convert.storage.elements import Files
from mcore_convert.storage.gather import gathered
from mcore_convert.storage.views import View

NBYTES = 6 * 2**20  # more than is read at once


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gather") / "file"
    np.arange(NBYTES // 4, dtype=np.uint32).tofile(path)
    return path


def views(path: Path) -> list[View]:
    """Views of each kind: contiguous, rows apart, columns, transposed, broadcast, without elements, and at random."""
    chance = random.Random(3)
    result = [
        View(path, 4, (1024, 1024), (4096, 4), "float32"),
        View(path, 8, (700, 16), (8192, 4), "float32"),
        View(path, 8, (1024,), (4096,), "float32"),
        View(path, 8, (60,), (100_000,), "bfloat16"),
        View(path, 0, (512, 1024), (4, 2048), "float32"),
        View(path, 0, (300, 300), (4, 20_000), "float32"),
        View(path, 12, (5, 4), (0, 4), "float32"),
        View(path, 12, (), (), "float32"),
        View(path, 12, (0, 4), (16, 4), "float32"),
        View(path, 12, (1, 4, 1), (7, 4, 99), "float32"),
        View(path, NBYTES - 4, (1,), (4,), "float32"),
        View(path, 0, (NBYTES,), (1,), "uint8"),
    ]
    for _ in range(200):
        shape = tuple(chance.choice([1, 2, 3, 5, 8]) for _ in range(chance.randint(1, 4)))
        strides = tuple(2 * chance.choice([0, 1, 2, 3, 8, 64, 3000, 5000, 50_000]) for _ in shape)
        span = sum((size - 1) * step for size, step in zip(shape, strides, strict=True)) + 2
        if span < NBYTES:
            result.append(View(path, chance.randrange(0, NBYTES - span + 1), shape, strides, "bfloat16"))
    return result


def test_each_kind_of_view(file: Path) -> None:
    mapped = np.memmap(file, np.uint8, "r")
    with file.open("rb") as opened:
        for view in views(file):
            wanted = np.ndarray(view.shape, f"u{view.itemsize}", mapped, view.offset, view.strides)
            actual = gathered(opened.fileno(), view)
            assert actual.dtype == wanted.dtype
            assert np.array_equal(actual, wanted), view
            actual[...] = 0  # ours, and not the file's
            strided = np.zeros((*view.shape, 2), actual.dtype)[..., 0]
            turned = np.zeros(view.shape[::-1], actual.dtype).T
            for into in (actual, strided, turned):
                gathered(opened.fileno(), view, into)
                assert np.array_equal(into, wanted), view


@pytest.mark.parametrize(
    "view",
    [
        View(Path("f"), 0, (NBYTES + 1,), (1,), "uint8"),
        View(Path("f"), 0, (NBYTES // 4096 + 1, 2), (4096, 1), "uint8"),
        View(Path("f"), 0, (NBYTES // 10_000 + 2, 2), (10_000, 1), "uint8"),
        View(Path("f"), NBYTES - 3, (), (), "float32"),
    ],
    ids=["contiguous", "with gaps", "in runs", "a number"],
)
def test_a_file_that_ends_before(view: View, file: Path) -> None:
    with file.open("rb") as opened, pytest.raises(Shrunk):
        gathered(opened.fileno(), view._replace(path=file))


def test_copies_of_the_same_rows_are_read_together(tmp_path: Path) -> None:
    rows, cols, ranks = 1500, 1024, 8
    matrix = np.arange(rows * cols, dtype=np.uint32).reshape(rows, cols)
    matrix.tofile(tmp_path / "source")
    (tmp_path / "target").write_bytes(bytes(matrix.nbytes))
    width = cols // ranks
    copies = []
    for rank in reversed(range(ranks)):
        source = View(tmp_path / "source", 4 * width * rank, (rows, width), (4 * cols, 4), "float32")
        target = View(tmp_path / "target", matrix.nbytes // ranks * rank, (rows, width), (4 * width, 4), "float32")
        copies.append(Copy(source, target))
    alone = copies[0]._replace(source=copies[0].source._replace(dtype="int32"))
    groups = together([*copies, alone])
    assert [len(group) for group in groups] == [ranks, 1]
    assert [len(group) for group in together(copies[::4])] == [1, 1]  # most of what would be read is in none
    with Files() as files:
        assert sum(copy_together(files, groups[0])) == matrix.nbytes
    written = np.fromfile(tmp_path / "target", np.uint32).reshape(ranks, rows, width)
    assert np.array_equal(written, matrix.reshape(rows, ranks, width).transpose(1, 0, 2))
