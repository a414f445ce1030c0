"""Tiling of a tensor by boxes: right for any boxes, and fast where a key has one for each expert of each layer."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_convert.spec.shard import Box
from mcore_convert.spec.tiling import untiled

SHAPE = (4, 3, 5)


def interval(size: int) -> st.SearchStrategy[tuple[int, int]]:
    """Return an offset and a length that lie in a dimension."""
    return st.integers(0, size - 1).flatmap(lambda at: st.tuples(st.just(at), st.integers(1, size - at)))


boxes = st.tuples(*map(interval, SHAPE)).map(lambda parts: Box(tuple(p[0] for p in parts), tuple(p[1] for p in parts)))


@settings(deadline=None)
@given(st.lists(boxes, max_size=8))
def test_an_overlap_is_found_wherever_there_is_one(parts: list[Box]) -> None:
    shared = any(one.intersect(other) is not None for one, other in itertools.combinations(parts, 2))
    reason = untiled(parts, SHAPE)
    assert ("overlap" in (reason or "")) is shared
    assert (reason is None) is (not shared and sum(part.numel for part in parts) == 4 * 3 * 5)


def test_chunks_of_experts_are_not_compared_with_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """94 layers of 128 experts have 12,032 chunks under one key: compared in pairs, they take minutes."""
    chunks = [Box((layer, expert, half), (1, 1, 1)) for layer in range(20) for expert in range(30) for half in (0, 1)]
    calls: list[Any] = []
    intersect = Box.intersect

    def counted(self: Box, other: Box) -> Box | None:
        calls.append(other)
        return intersect(self, other)

    monkeypatch.setattr(Box, "intersect", counted)
    assert untiled(chunks, (20, 30, 2)) is None
    assert not calls  # they are the cells of a grid
    unlike = [*chunks[:-2], Box((19, 29, 0), (1, 1, 2))]
    assert untiled(unlike, (20, 30, 2)) is None
    assert len(calls) == len(unlike)  # each with the whole tensor
    assert "overlap" in (untiled([*chunks, chunks[7]], (20, 30, 2)) or "")


@settings(deadline=None, max_examples=30)
@given(st.tuples(*(st.sampled_from([1, 2, 3]),) * 2), st.tuples(*(st.integers(1, 3),) * 2), st.randoms())
def test_cells_of_a_grid_tile_it_only_if_each_is_there_once(cell: Any, counts: Any, random: Any) -> None:
    shape = tuple(size * count for size, count in zip(cell, counts, strict=True))
    places = itertools.product(*(range(0, whole, size) for whole, size in zip(shape, cell, strict=True)))
    cells = [Box(place, cell) for place in places]
    random.shuffle(cells)
    assert untiled(cells, shape) is None
    assert "in no part" in str(untiled(cells[1:], shape))
    assert "overlap" in str(untiled([*cells, cells[0]], shape))
    shifted = Box((cells[0].offsets[0] + 1, *cells[0].offsets[1:]), cell)
    assert untiled([shifted, *cells[1:]], shape) is not None
    if len(cells) > 1:
        assert "overlap" in str(untiled([*cells[1:], cells[-1]], shape))
