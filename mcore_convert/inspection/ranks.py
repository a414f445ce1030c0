"""The part of each rank of a layout: its layers, its share of their weights, and its bytes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from mcore_convert.spec.dims import Dims
from mcore_convert.spec.family import Family, Weight
from mcore_convert.spec.holding import Holding, is_of_expert
from mcore_convert.spec.layout import Layout, Rank
from mcore_convert.spec.shard import Box
from mcore_convert.storage.views import DTYPE_SIZES

EMBEDDING, OUTPUT = "embedding", "output"


@dataclass(frozen=True)
class RankPart:
    """Part of one rank: the layers of each of its stages, what else it holds, and the bytes of its weights.

    `layers` are global indices, a range per virtual stage. `experts` are global indices, if there are any;
    `expert_part` is the index of the rank's part of each expert, and the number of parts.
    """

    rank: Rank
    layers: tuple[range, ...]
    ends: tuple[str, ...]
    experts: range | None
    nbytes: int
    num_parameters: int
    expert_part: tuple[int, int] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {**asdict(self), "rank": self.rank._asdict()}


def rank_parts(family: Family, dims: Dims, layout: Layout, dtype: str) -> list[RankPart]:
    """Return the parts of all ranks, as Megatron Core builds them.

    Args:
        dtype: dtype of the weights.

    Raises:
        LayoutError: the model does not fit the layout.
    """
    layout = layout.of_model(dims)
    layout.check(dims)
    holding = Holding(layout, layout.stages(dims.num_layers))
    weights = [weight for weight in family.weights if weight.mcore is not None and weight.exists(dims)]
    sizes = {id(weight): _local_numel(weight, dims, layout) for weight in weights}
    numel: dict[int, int] = {}  # equal on all ranks of a pipeline stage
    parts = []
    for rank in layout.ranks():
        mine = {stage: layers for stage, layers in holding.stages.items() if stage.pp == rank.pp}
        experts = layout.experts(dims.num_experts, rank.ep) if dims.num_experts else None
        ends = tuple(name for stage, name in ((holding.first, EMBEDDING), (holding.last, OUTPUT)) if stage in mine)
        if rank.pp not in numel:
            every = (each for stage in mine for each in holding.held_on(weights, dims, stage, rank.ep))
            numel[rank.pp] = sum(sizes[id(each.weight)] for each in every)
        nbytes = numel[rank.pp] * DTYPE_SIZES[dtype]
        number, part = layout.cut_at(rank, is_expert=True)
        held = (part, number) if dims.num_experts else None
        parts.append(RankPart(rank, tuple(mine.values()), ends, experts, nbytes, numel[rank.pp], held))
    return parts


def _local_numel(weight: Weight, dims: Dims, layout: Layout) -> int:
    """Return the number of elements of a row on a rank that holds it."""
    whole = Box.whole(dims.padded_shape(weight.shape, vocab=weight.vocab)).numel
    cut = layout.expert_tp if is_of_expert(weight) else layout.tp
    return whole if weight.shard.dim is None else whole // cut
