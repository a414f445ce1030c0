"""Flat buffers: ranges of elements become boxes of the tensors that lie in them, wherever a boundary cuts."""

from __future__ import annotations

import itertools
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st

from mcore_convert.formats.megatron.flat import Local, boxes_of_range, local_of, slots_of_flat
from mcore_convert.formats.mp_rank.parameters import buffer_starts
from mcore_convert.spec import Box, Shard
from mcore_convert.spec.tiling import untiled
from mcore_convert.storage.views import TensorMeta, View

shapes = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)


def part(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))]


@given(shape=shapes, data=st.data())
def test_a_range_of_elements_is_a_few_boxes(shape: tuple[int, ...], data: st.DataObject) -> None:
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape)
    start = data.draw(st.integers(0, tensor.numel()))
    stop = data.draw(st.integers(start, tensor.numel()))
    boxes = boxes_of_range(shape, start, stop)
    result = [element for box, first in boxes for element in part(tensor, box).flatten().tolist()]
    assert result == list(range(start, stop))
    assert all(part(tensor, box).flatten()[0] == first for box, first in boxes)
    assert len(boxes) <= 2 * len(shape) - 1


def test_starts_are_reversed_and_aligned() -> None:
    """The dump of a two-layer model: output layer first, and the norm before the next multiple of 64."""
    assert buffer_starts([384, 16, 512], [False] * 3) == ([576, 512, 0], 960)


@given(
    rows=st.integers(1, 5),
    columns=st.integers(1, 5),
    tp=st.sampled_from([1, 2]),
    shard=st.sampled_from([Shard(), Shard(0), Shard(1), Shard(0, (1, 1))]),
    cuts=st.lists(st.integers(1, 200), max_size=4),
)
def test_a_tensor_is_found_in_any_pieces_of_its_buffer(
    rows: int, columns: int, tp: int, shard: Shard, cuts: list[int]
) -> None:
    shape = (rows * tp * len(shard.parts), columns * tp)
    whole = torch.arange(shape[0] * shape[1]).reshape(shape)
    result = torch.full(shape, -1)
    boxes = []
    for rank in range(tp):
        local = local_of(shard, shape, tp, rank)
        assert isinstance(local, Local)
        tensor = torch.empty(local.shape, dtype=torch.int64)
        for inside, outside in local.boxes:
            part(tensor, inside).copy_(part(whole, outside))
        (start, _), end = buffer_starts([local.numel, 7], [False] * 2)
        buffer = torch.full((end,), -2)
        buffer[start : start + local.numel] = tensor.flatten()
        bounds = sorted({0, end, *(cut for cut in cuts if cut < end)})
        pieces = [
            (low, View.of(Path("x"), low * 8, TensorMeta((high - low,), "int64")))
            for low, high in itertools.pairwise(bounds)
        ]
        for slot in slots_of_flat(pieces, start, local):
            view = slot.view
            value = buffer.as_strided(view.shape, tuple(s // 8 for s in view.strides), view.offset // 8)
            part(result, slot.box).copy_(value)
            boxes.append(slot.box)
        if shard.dim is None:
            break
    assert torch.equal(result, whole)
    assert untiled(boxes, shape) is None
