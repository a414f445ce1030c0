"""What each rank of a layout holds: layers, the share of their weights, and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mcore_convert.spec.dims import Dims
from mcore_convert.spec.family import Family, Weight
from mcore_convert.spec.layout import Layout, Rank
from mcore_convert.spec.names import placeholders_of
from mcore_convert.spec.shard import Box
from mcore_convert.storage.views import DTYPE_SIZES

EMBEDDING, OUTPUT = "embedding", "output"


@dataclass(frozen=True)
class RankPart:
    """One rank: the layers of each of its stages, what else it holds, and the bytes of its weights.

    `layers` are global indices, a range for each virtual stage. `experts` are global indices, where there are any.
    """

    rank: Rank
    layers: tuple[range, ...]
    ends: tuple[str, ...]
    experts: range | None
    nbytes: int
    num_parameters: int


def rank_parts(family: Family, dims: Dims, layout: Layout, dtype: str) -> list[RankPart]:
    """The parts of all ranks, as Megatron Core builds them.

    Args:
        dtype: of the weights.

    Raises:
        LayoutError: the model does not fit the layout.
    """
    layout.check(dims)
    stages = layout.stages(dims.num_layers)
    first, last = min(stages), max(stages)
    weights = [weight for weight in family.weights if weight.mcore is not None and weight.exists(dims)]
    parts = []
    for rank in layout.ranks():
        mine = {stage: layers for stage, layers in stages.items() if stage.pp == rank.pp}
        experts = layout.experts(dims.num_experts, rank.ep) if dims.num_experts else None
        ends = tuple(name for stage, name in ((first, EMBEDDING), (last, OUTPUT)) if stage in mine)
        held = [layer for layers in mine.values() for layer in layers]
        numel = sum(_numel_on(weight, dims, layout, ends, held, experts) for weight in weights)
        if dims.tied and last in mine and first not in mine:  # the copy of the embedding that serves as the head
            numel += _local_numel(family.weights[0], dims, layout.tp)
        parts.append(RankPart(rank, tuple(mine.values()), ends, experts, numel * DTYPE_SIZES[dtype], numel))
    return parts


def _numel_on(
    weight: Weight, dims: Dims, layout: Layout, ends: Sequence[str], layers: Sequence[int], experts: range | None
) -> int:
    """Elements that a rank holds of a row: of an end of the model, of its layers, of its experts in each of them."""
    assert weight.mcore is not None
    placeholders = placeholders_of(weight.mcore)
    if "layer" not in placeholders:
        end = EMBEDDING if weight.mcore.startswith("embedding.") else OUTPUT
        return _local_numel(weight, dims, layout.tp) if end in ends else 0
    count = sum(1 for layer in layers if weight.in_layer(layer, dims))
    if "expert" in placeholders:
        return count * len(experts or ()) * _local_numel(weight, dims, layout.expert_tp)
    return count * _local_numel(weight, dims, layout.tp)


def _local_numel(weight: Weight, dims: Dims, tp: int) -> int:
    shape = dims.shape(weight.shape)
    if weight.vocab:
        shape = (dims.padded_vocab_size, *shape[1:])
    whole = Box.whole(shape).numel
    return whole if weight.shard.dim is None else whole // tp
