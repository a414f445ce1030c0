"""fp32 numbers that are stored as a bfloat16 and a remainder, against the steps of the kernel that makes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mcore_convert.errors import UnreadableCheckpoint
from mcore_convert.spec.shard import Box
from mcore_convert.storage.blocks import Scratch, read
from mcore_convert.storage.elements import Files, copy_view
from mcore_convert.storage.joining import join_slots, join_views
from mcore_convert.storage.rounding import rounds_to
from mcore_convert.storage.spans import Block, parts_of, spans_of
from mcore_convert.storage.views import Slot, TensorMeta, View

EVERY: NDArray[np.uint16] = np.arange(2**16, dtype=np.uint32).astype(np.uint16)
FINITE = EVERY[(EVERY & 0x7F80) != 0x7F80]
# Zeros, subnormals, the ends of binades and of the finite numbers, ones, and some in between.
EDGES = (0, 1, 2, 0x7F, 0x80, 0x81, 0x3F7F, 0x3F80, 0x3F81, 0x3DCC, 0x4049, 0x7F7E, 0x7F7F, 0x7FFE, 0x7FFF)
WORDS = np.array([edge | sign for edge in EDGES for sign in (0, 0x8000)], np.uint16)


def kernel(weights: NDArray[np.uint16], remainders: NDArray[np.int16]) -> NDArray[np.float32]:
    """Return what Transformer Engine's kernel makes of them: it undoes the rounding, and puts both into a union."""
    both = np.empty((len(weights), 2), np.int16)
    both[:, 0] = remainders
    both[:, 1] = weights.view(np.int16)
    both[remainders < 0, 1] -= 1
    return both.view(np.float32)[:, 0]


def stored(path: Path, array: NDArray[Any], dtype: str) -> View:
    """Return a file of an array, and its view."""
    path.write_bytes(array.tobytes())
    return View.of(path, 0, TensorMeta(array.shape, dtype))


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("every", ["remainder", "word"])
def test_the_number_is_that_of_the_kernel(every: str, gathered: bool, tmp_path: Path) -> None:
    """All remainders with the words at the edges; all finite words with the remainders at theirs."""
    if every == "remainder":
        words, remainders = np.tile(WORDS, len(EVERY)), np.repeat(EVERY, len(WORDS)).view(np.int16)
    else:
        words, remainders = np.tile(FINITE, len(WORDS)), np.repeat(WORDS, len(FINITE)).view(np.int16)
    numbers = remainders.astype(np.float32) if gathered else remainders
    low = stored(tmp_path / "low", numbers, "float32" if gathered else "int16")
    view = join_views(low, stored(tmp_path / "high", words, "bfloat16"))
    assert view.dtype == "float32"
    wanted = kernel(words, remainders)
    with Files() as files:
        actual = files.read(view)
        assert np.array_equal(actual, wanted.view(np.uint32))
        finite = np.isfinite(wanted) & ((words & 0x7F80) != 0x7F80)  # zero below zero is none, and is never stored
        assert finite.mean() > 0.8
        assert rounds_to(actual[finite], words[finite], "bfloat16").all()


def test_no_number_has_two_forms() -> None:
    """Every fp32 number of one binade comes back from the weight that it rounds to and its lower half."""
    bits = np.arange(0x3F800000, 0x40000000, 7, dtype=np.uint32)
    rounded = ((bits + 0x8000) >> 16).astype(np.uint16)
    assert np.array_equal(kernel(rounded, bits.astype(np.uint16).view(np.int16)).view(np.uint32), bits)
    assert rounds_to(bits, rounded, "bfloat16").all()
    assert not rounds_to(bits, rounded + 1, "bfloat16").any()


@pytest.fixture
def matrix(tmp_path: Path) -> tuple[View, NDArray[np.float32]]:
    """A matrix of joined numbers, 40 x 50, that is a part of wider ones, and its numbers."""
    generator = np.random.default_rng(3)
    bits = generator.integers(0x3F000000, 0x40000000, (60, 70), dtype=np.uint32)
    low = stored(tmp_path / "low", bits.astype(np.uint16), "int16")
    high = stored(tmp_path / "high", ((bits + 0x8000) >> 16).astype(np.uint16), "bfloat16")
    box = Box((10, 15), (40, 50))
    (slot,) = join_slots([Slot(low, Box.whole((60, 70)))], [Slot(high.narrow(box), box)])
    assert slot.box == box
    return slot.view, bits.view(np.float32)[10:50, 15:65]


def test_a_joined_view_is_cut_and_turned_in_both_its_parts(matrix: tuple[View, NDArray[np.float32]]) -> None:
    view, numbers = matrix
    with Files() as files:

        def values(part: View) -> NDArray[np.float32]:
            return files.read(part).view(np.float32)

        assert np.array_equal(values(view), numbers)
        assert np.array_equal(values(view.transposed), numbers.T)
        assert np.array_equal(values(view.narrow(Box((3, 4), (5, 6)))), numbers[3:8, 4:10])
        assert np.array_equal(values(view.block((slice(2, 9),))), numbers[2:9])
        assert np.array_equal(values(view.select(7)), numbers[7])
        assert [each.path for each in view.stored] == [view.path, view.path.with_name("high")]


def test_a_joined_view_is_copied(matrix: tuple[View, NDArray[np.float32]], tmp_path: Path) -> None:
    view, numbers = matrix
    target = stored(tmp_path / "target", np.zeros((50, 40), np.float32), "float32")
    with Files() as files:
        assert sum(copy_view(files, view, target.transposed)) == numbers.nbytes
    assert np.array_equal(np.fromfile(target.path, np.float32).reshape(50, 40), numbers.T)


def test_statistics_read_joined_numbers(matrix: tuple[View, NDArray[np.float32]], tmp_path: Path) -> None:
    """Through spans, which join what lies together in a file, and blocks, which read whole runs of it."""
    view, numbers = matrix
    flat = stored(tmp_path / "numbers", np.array([1.0, -2.0, 3.0], np.float32), "float32")
    row = join_views(flat, view.high.select(0).narrow(Box((0,), (3,))) if view.high else flat)
    scratch = Scratch()
    with Files() as files:
        for slot in (Slot(view.transposed, Box.whole((50, 40))), Slot(row, Box.whole((3,)))):
            wanted = np.sort(files.read(slot.view).reshape(-1))
            (part,) = parts_of(spans_of([slot]))
            actual = [read(files, part.span.views[0], block, scratch, "a").exact.copy() for block in part.blocks]
            assert np.array_equal(np.sort(np.concatenate(actual)), wanted)
        whole = read(files, row, Block(0, 3, (slice(0, 3),)), scratch, "a").exact
    weights = (numbers.view(np.uint32)[0, :3].astype(np.uint64) + 0x8000 >> 16).astype(np.uint32)
    assert whole.tolist() == [(int(weight) << 16) + added for weight, added in zip(weights, (1, -2, 3), strict=True)]


@pytest.mark.parametrize("number", [0.5, 32768.0, -32769.0, np.nan, np.inf])
def test_what_is_no_remainder_is_refused(number: float, tmp_path: Path) -> None:
    low = stored(tmp_path / "low", np.array([0, number], np.float32), "float32")
    view = join_views(low, stored(tmp_path / "high", np.zeros(2, np.uint16), "bfloat16"))
    with (
        Files() as files,
        np.errstate(invalid="ignore"),
        pytest.raises(UnreadableCheckpoint, match="no 16-bit remainder"),
    ):
        files.read(view)
