"""Tiling of a tensor by boxes: right for any boxes, and fast where a key has one for each expert of each layer."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_convert.spec.shard import Box
from mcore_convert.storage.views import untiled

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
    assert len(calls) == len(chunks)  # each with the whole tensor
    assert "overlap" in (untiled([*chunks, chunks[7]], (20, 30, 2)) or "")
