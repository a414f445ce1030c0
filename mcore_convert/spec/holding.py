"""The ranks that hold each tensor of a model, and the tensors that a rank holds of a model chunk.

From Megatron Core 0.16: `transformer/transformer_block.py` (the layers of a stage), `models/gpt/gpt_model.py` (the
embedding on the first stage, the rest on the last, where a tied embedding has a copy) and
`transformer/moe/moe_layer.py` (the experts of a rank, numbered from 0 on each).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

from mcore_convert.spec.dims import Dims
from mcore_convert.spec.family import Weight
from mcore_convert.spec.gpt import EMBEDDING
from mcore_convert.spec.layout import Layout, Stage
from mcore_convert.spec.names import Index, placeholders_of


class Held(NamedTuple):
    """A tensor of a model chunk: its row, its index in the model, and its index in the modules of the chunk.

    `is_copy`: it is the embedding again, as the head of a tied model on another stage.
    """

    weight: Weight
    at: Index
    local: Index
    is_copy: bool = False


class Home(NamedTuple):
    """The stage of a tensor, its expert-parallel rank where it has one, and its index in the modules there."""

    stage: Stage
    ep: int | None
    local: Index


@dataclass(frozen=True)
class Holding:
    """A layout with the layers that each of its stages holds, in the order of the forward pass."""

    layout: Layout
    stages: Mapping[Stage, range]

    @cached_property
    def first(self) -> Stage:
        """The stage with the embedding."""
        return min(self.stages)

    @cached_property
    def last(self) -> Stage:
        """The stage with the final norm and the output layer."""
        return max(self.stages)

    def shares_embedding(self, dims: Dims) -> bool:
        """Whether another rank than that of the embedding has a copy of it."""
        return dims.tied and self.last.pp != self.first.pp

    def home_of(self, weight: Weight, at: Index, dims: Dims) -> Home:
        """Return where a tensor is."""
        layer, expert, ep = at.layer, at.expert, None
        if expert is not None:
            ep, expert = divmod(expert, (dims.num_experts or 0) // self.layout.ep)
        if layer is not None:
            stage, layer = self._stage_of[layer]
        else:
            stage = self.first if (weight.mcore or "").startswith("embedding.") else self.last
        return Home(stage, ep, Index(layer, expert))

    @cached_property
    def _stage_of(self) -> dict[int, tuple[Stage, int]]:
        return {layer: (stage, at) for stage, layers in self.stages.items() for at, layer in enumerate(layers)}

    def held_on(
        self, rows: Sequence[Weight], dims: Dims, stage: Stage, ep: int, *, grouped: bool = False
    ) -> Iterator[Held]:
        """Yield what the ranks of a stage with an expert-parallel rank hold of a model chunk.

        Args:
            rows: in the order in which modules register them.
            grouped: the experts of a layer are kept by the linear layer that holds them all, and not one by one.
        """
        for per_layer, block in groupby(rows, key=lambda weight: weight.per_layer):
            members = list(block)
            for number, layer in enumerate(self.stages[stage] if per_layer else ()):
                present = [weight for weight in members if weight.in_layer(layer, dims)]
                yield from self._layer(present, dims, number, layer, ep, grouped=grouped)
            for weight in () if per_layer else members:
                if self.home_of(weight, Index(), dims).stage == stage:
                    yield Held(weight, Index(), Index())
        if stage == self.last and self.shares_embedding(dims):
            yield from (Held(weight, Index(), Index(), True) for weight in rows if weight.mcore == EMBEDDING)

    def _layer(
        self, rows: Sequence[Weight], dims: Dims, number: int, layer: int, ep: int, *, grouped: bool
    ) -> Iterator[Held]:
        """Yield the tensors of layer `layer`, which is layer `number` of its chunk."""
        for of_experts, block in groupby(rows, is_of_expert):
            members = list(block)
            if not of_experts:
                yield from (Held(weight, Index(layer), Index(number)) for weight in members)
                continue
            modules = [members]
            if grouped:
                modules = [list(part) for _, part in groupby(members, lambda row: (row.mcore or "").rpartition(".")[0])]
            for module in modules:
                for local, expert in enumerate(self.layout.experts(dims.num_experts or 0, ep)):
                    yield from (Held(weight, Index(layer, expert), Index(number, local)) for weight in module)


def is_of_expert(weight: Weight) -> bool:
    """Whether a row stands for each expert."""
    return "expert" in placeholders_of(weight.mcore or "")
