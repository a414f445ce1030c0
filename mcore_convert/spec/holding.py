"""The ranks that hold each tensor of a model, and the tensors of a model chunk that a rank holds.

From Megatron Core 0.16: `transformer/transformer_block.py` (the layers of a stage), `models/gpt/gpt_model.py` (the
embedding on the first stage, the rest on the last, with a copy of a tied embedding) and
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
from mcore_convert.spec.gpt import EMBEDDING, OUTPUT
from mcore_convert.spec.layout import Layout, Stage
from mcore_convert.spec.names import Index, placeholders_of


class Held(NamedTuple):
    """A tensor of a model chunk: its row, its index in the model, and its index in the chunk's modules.

    `copied_as`: the tensor is a copy of the embedding on another stage, under this name: the head of a tied model, or
    the embedding for layers that predict further tokens.
    """

    weight: Weight
    at: Index
    local: Index
    copied_as: str | None = None


class Home(NamedTuple):
    """The stage of a tensor, its expert-parallel rank if it has one, and its index in the modules there."""

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
        """Stage with the embedding."""
        return min(self.stages)

    @cached_property
    def last(self) -> Stage:
        """Stage with the final norm and the output layer."""
        return max(self.stages)

    def mtp(self, dims: Dims) -> Stage:
        """Return the stage with the layers that predict further tokens."""
        return self.layout.mtp_stage(dims.num_layers)

    def copies_of_embedding(self, dims: Dims) -> dict[str, Stage]:
        """Return the other stages with a copy of the embedding, by the name of the copy.

        From Megatron Core 0.16, `gpt_model.py`: `tie_word_embeddings_state_dict`, `setup_embeddings_and_output_layer`.
        """
        copies = {}
        if dims.mtp_num_layers and self.mtp(dims) != self.first:
            copies[EMBEDDING] = self.mtp(dims)
        if dims.tied and self.last.pp != self.first.pp:
            copies[OUTPUT] = self.last
        return copies

    def home_of(self, weight: Weight, at: Index, dims: Dims) -> Home:
        """Return the home of a tensor."""
        layer, expert, ep = at.layer, at.expert, None
        if expert is not None:
            ep, expert = divmod(expert, (dims.num_experts or 0) // self.layout.ep)
        if at.mtp is not None:
            stage = self.mtp(dims)
        elif layer is not None:
            stage, layer = self._stage_of[layer]
        elif weight.mcore is not None and weight.mcore.startswith("decoder.") and dims.mtp_num_layers:
            stage, _ = self._stage_of[dims.num_layers - 1]  # on the stage of the decoder's last layer
        else:
            stage = self.first if (weight.mcore or "").startswith("embedding.") else self.last
        return Home(stage, ep, Index(layer, expert, at.mtp))

    @cached_property
    def _stage_of(self) -> dict[int, tuple[Stage, int]]:
        return {layer: (stage, at) for stage, layers in self.stages.items() for at, layer in enumerate(layers)}

    def held_on(
        self, rows: Sequence[Weight], dims: Dims, stage: Stage, ep: int, *, grouped: bool = False
    ) -> Iterator[Held]:
        """Yield the tensors of a model chunk on the ranks of a stage with an expert-parallel rank.

        Args:
            rows: in the order in which modules register them.
            grouped: the experts of a layer are grouped by linear layer instead of one after the other.
        """
        copies = self.copies_of_embedding(dims)
        for (per_layer, predicts), block in groupby(rows, key=lambda weight: (weight.per_layer, weight.predicts)):
            members = list(block)
            if predicts:
                mine = dims.predicting if stage == self.mtp(dims) else range(0)
            else:
                mine = self.stages[stage] if per_layer else range(0)
            for number, layer in enumerate(mine):
                present = [weight for weight in members if weight.in_layer(layer, dims)]
                at = Index(layer, None, number) if predicts else Index(layer)
                yield from self._layer(present, dims, at, at._replace(layer=number), ep, grouped=grouped)
            for weight in () if per_layer else members:
                if self.home_of(weight, Index(), dims).stage == stage:
                    yield Held(weight, Index(), Index())
                elif weight.mcore == EMBEDDING and copies.get(EMBEDDING) == stage:
                    yield Held(weight, Index(), Index(), EMBEDDING)
        if copies.get(OUTPUT) == stage:
            yield from (Held(weight, Index(), Index(), OUTPUT) for weight in rows if weight.mcore == EMBEDDING)

    def _layer(
        self, rows: Sequence[Weight], dims: Dims, at: Index, local: Index, ep: int, *, grouped: bool
    ) -> Iterator[Held]:
        """Yield the tensors of the layer with index `at` in the model and `local` in its chunk."""
        for of_experts, block in groupby(rows, is_of_expert):
            members = list(block)
            if not of_experts:
                yield from (Held(weight, at, local) for weight in members)
                continue
            modules = [members]
            if grouped:
                modules = [list(part) for _, part in groupby(members, lambda row: (row.mcore or "").rpartition(".")[0])]
            for module in modules:
                for number, expert in enumerate(self.layout.experts(dims.num_experts or 0, ep)):
                    there, here = at._replace(expert=expert), local._replace(expert=number)
                    yield from (Held(weight, there, here) for weight in module)


def is_of_expert(weight: Weight) -> bool:
    """Return whether each expert has the row's weight."""
    return "expert" in placeholders_of(weight.mcore or "")
