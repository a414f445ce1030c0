"""Packs and boxes: bijections by construction, proven on random sizes, and the orders of rows spelled out."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mcore_convert.errors import LayoutError
from mcore_convert.spec import QKV, Box, Concat, Dims, Every, Fused, Interleaved, Pack, Same, Shard, Transposed
from mcore_convert.spec.tiling import untiled

PACKS = [
    *(Same(), Concat(), Concat(3), QKV(), Fused(QKV()), Fused(Concat()), Interleaved(Concat()), Interleaved(Concat(3))),
    *(Transposed(), Transposed(Fused(QKV())), Transposed(Interleaved(Concat()))),
]


def dims_of(groups: int, per_group: int, head: int, hidden: int) -> Dims:
    return Dims(
        num_layers=1,
        hidden_size=hidden,
        ffn_hidden_size=6 * head,
        num_attention_heads=groups * per_group,
        num_query_groups=groups,
        kv_channels=head,
        vocab_size=7,
        padded_vocab_size=8,
        max_position_embeddings=4,
        tied=True,
        qkv_bias=True,
        linear_bias=True,
    )


sizes = st.builds(dims_of, st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 4))


def rows_of(pack: Pack, dims: Dims) -> int:
    return dims.size("qkv") if "QKV" in repr(pack) else dims.ffn_hidden_size


def packed(pack: Pack, tensors: Sequence[torch.Tensor], shape: tuple[int, ...], dims: Dims) -> torch.Tensor:
    """Return what the pieces say, done with torch."""
    whole = torch.zeros(shape, dtype=torch.int64)
    for piece in pack.pieces(shape, dims):
        part = lane(tensors[piece.tensor], piece.every)[slices(piece.hf)]
        whole[slices(piece.mcore)] = part.T if piece.transposed else part
    return whole


def lane(tensor: torch.Tensor, every: Every | None) -> torch.Tensor:
    """Return the indices of a tensor that a piece is of."""
    if every is None:
        return tensor
    return tensor[(slice(None),) * every.axis + (slice(every.first, None, every.step),)]


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))


@pytest.mark.parametrize("pack", PACKS, ids=repr)
@given(dims=sizes, bias=st.booleans())
def test_a_pack_moves_every_element_once(pack: Pack, dims: Dims, bias: bool) -> None:
    shape = (
        (rows_of(pack, dims),) if bias and "Transposed" not in repr(pack) else (rows_of(pack, dims), dims.hidden_size)
    )
    shapes = pack.shapes(shape, dims)
    pieces = pack.pieces(shape, dims)
    assert untiled([piece.mcore for piece in pieces], shape) is None
    for number, part in enumerate(shapes):
        of_tensor = [piece for piece in pieces if piece.tensor == number]
        for every in {piece.every for piece in of_tensor}:
            tensor = lane(torch.empty(part, device="meta"), every)
            assert untiled([piece.hf for piece in of_tensor if piece.every == every], tuple(tensor.shape)) is None
    tensors, start = [], 0
    for part in shapes:
        count = torch.Size(part).numel()
        tensors.append(torch.arange(start, start + count).reshape(part))
        start += count
    whole = packed(pack, tensors, shape, dims)
    assert sorted(whole.flatten().tolist()) == list(range(start))
    back = [torch.empty(part, dtype=torch.int64) for part in shapes]
    for piece in pieces:
        moved = whole[slices(piece.mcore)]
        lane(back[piece.tensor], piece.every)[slices(piece.hf)] = moved.T if piece.transposed else moved
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(back, tensors, strict=True))


def test_qkv_is_interleaved_by_group() -> None:
    dims = dims_of(groups=2, per_group=2, head=1, hidden=1)
    q, k, v = torch.tensor([10, 11, 12, 13]), torch.tensor([20, 21]), torch.tensor([30, 31])
    assert packed(QKV(), [q, k, v], (8,), dims).tolist() == [10, 11, 20, 30, 12, 13, 21, 31]


def test_gpt2_attention_is_fused_and_transposed() -> None:
    dims = dims_of(groups=2, per_group=1, head=1, hidden=2)
    c_attn = torch.tensor([[0, 1, 2, 3, 4, 5], [10, 11, 12, 13, 14, 15]])  # [in, q0 q1 k0 k1 v0 v1]
    whole = packed(Transposed(Fused(QKV())), [c_attn], (6, 2), dims)
    assert whole.tolist() == [[0, 10], [2, 12], [4, 14], [1, 11], [3, 13], [5, 15]]


def test_columns_of_gate_and_up_take_turns() -> None:
    dims = dims_of(groups=1, per_group=1, head=1, hidden=2)
    both = torch.tensor([[0, 1, 2, 3], [10, 11, 12, 13]])  # [in, g0 u0 g1 u1]
    whole = packed(Transposed(Interleaved(Concat())), [both], (4, 2), dims)
    assert whole.tolist() == [[0, 10], [2, 12], [1, 11], [3, 13]]


@given(box=st.tuples(st.integers(0, 9), st.integers(0, 9)), first=st.integers(0, 2), step=st.integers(1, 4))
def test_a_box_of_every_so_many_indices(box: tuple[int, int], first: int, step: int) -> None:
    offset, size = box
    every = Every(1, first, step)
    part = every.box(Box((7, offset), (3, size)))
    assert (part.offsets[0], part.sizes[0]) == (7, 3)
    numbers = range(part.offsets[1], part.offsets[1] + part.sizes[1])
    inside = [index for index in range(offset, offset + size) if index >= first and (index - first) % step == 0]
    assert [every.index_of(number) for number in numbers] == inside


@given(
    shape=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    tp=st.sampled_from([1, 2, 3, 4]),
    shard=st.sampled_from([Shard(), Shard(0), Shard(1), Shard(0, (1, 1)), Shard(0, (3, 1, 2), ("a", "b", "c"))]),
)
def test_the_boxes_of_all_ranks_tile_the_tensor(shape: tuple[int, int], tp: int, shard: Shard) -> None:
    count = sum(map(int, shard.parts))
    whole = tuple(size * tp * count for size in shape)
    assert untiled(shard.grid(whole, tp), whole) is None
    if shard.dim is not None:
        tensor = torch.arange(torch.Size(whole).numel()).reshape(whole)
        for rank in range(tp):  # rank r holds piece r of every part
            local = torch.cat([tensor[slices(box)] for box in shard.boxes(whole, tp, rank)], shard.dim)
            parts = tensor.split(shard.lengths(whole[shard.dim]), shard.dim)
            assert torch.equal(local, torch.cat([part.chunk(tp, shard.dim)[rank] for part in parts], shard.dim))


def test_what_cannot_be_cut_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"dimension 0 of \[6, 4\] cannot be cut into tp = 4 parts"):
        Shard(0).boxes((6, 4), 4, 0)
    with pytest.raises(LayoutError, match=r"dimension 0 of \[12, 4\], 10 of them, cannot be cut into tp = 4 parts"):
        Shard(0, (5, 1), ("a", "b")).boxes((12, 4), 4, 0)
    with pytest.raises(LayoutError, match=r"a dimension of 7 cannot be cut into 1 \+ 1 parts"):
        Shard(0, (1, 1)).boxes((7,), 1, 0)


@pytest.mark.parametrize(
    ("boxes", "reason"),
    [
        ([Box((0,), (2,)), Box((2,), (1,))], "1 of 4 elements are in no part"),
        ([Box((0,), (3,)), Box((2,), (2,))], r"the parts at \[0\] and \[2\] overlap"),
        ([Box((2,), (3,))], r"a part at \[2\] of size \[3\] lies outside"),
        ([Box((0, 0), (2, 2))], "lies outside"),
        ([], "4 of 4 elements are in no part"),
    ],
)
def test_parts_that_do_not_tile_are_distinguished(boxes: list[Box], reason: str) -> None:
    import re

    assert re.search(reason, str(untiled(boxes, (4,))))
