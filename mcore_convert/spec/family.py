"""Table rows, one for each weight of a model, and families as lists of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

from mcore_convert.spec.config.mapping import ConfigMapping
from mcore_convert.spec.dims import Dims
from mcore_convert.spec.names import PARAM, Index, placeholders_of, spell
from mcore_convert.spec.pack import Pack, Same
from mcore_convert.spec.shard import COLUMN, GATED_COLUMN, REPLICATED, ROW, Shape, Shard

Condition = Callable[[Dims], bool]


def always(dims: Dims) -> bool:
    """Return True: the condition of a weight that every model of the family has."""
    return True


@dataclass(frozen=True)
class Spelling:
    """Names of the Hugging Face tensors that hold a weight, and their pack.

    If the weight is an expert's and a name has no `{expert}`, the tensor has all experts of a layer along its first
    dimension, and the pack is that of one expert.
    """

    hf: tuple[str, ...]
    pack: Pack = Same()


@dataclass(frozen=True)
class Weight:
    """One row: the names of a weight on both sides, its shape, its pack and its shard.

    `mcore` is the key of Megatron's `torch_dist` format with all placeholders; None for a tensor that only Hugging Face
    has and that must be zero. `shape` is that of the global tensor, in the words of `Dims.size`. A name in `hf` may be
    that of one tensor for all experts of a layer, as in `Spelling`.
    `vocab` rows have the vocabulary as their first dimension, which Megatron pads. A row that is not `trained` is a
    buffer without optimizer state. `part` names the part of a layer that the row belongs to, in the words of
    `spec.layers`: layers without that part do not have the weight. `also` are further spellings that are read if a file
    has none of the names in `hf`; they are never written. `copy_of` marks a tensor that only Hugging Face has, in each
    layer that predicts further tokens, as a copy of the weight with that `mcore`: a file may lack the copy, a copy that
    is there must be equal, and it is always written. `less` is Hugging Face's numbers minus Megatron's: 1 for a norm,
    a vector, that only Megatron stores around zero.
    """

    mcore: str | None
    shape: tuple[str, ...]
    hf: tuple[str, ...]
    shard: Shard = REPLICATED
    pack: Pack = Same()
    when: Condition = always
    vocab: bool = False
    trained: bool = True
    part: str | None = None
    also: tuple[Spelling, ...] = ()
    copy_of: str | None = None
    less: float = 0.0

    def __hash__(self) -> int:
        """Hash the names, which are unique in a family: fast, since items are looked up per expert and layer."""
        return hash((self.mcore, self.hf))

    @cached_property
    def spellings(self) -> tuple[Spelling, ...]:
        """All spellings in Hugging Face directories; the first is the one that is written."""
        return (Spelling(self.hf, self.pack), *self.also)

    @property
    def name(self) -> str:
        """Name of the row in messages."""
        return self.mcore or self.hf[0]

    @cached_property
    def per_expert(self) -> bool:
        """Whether each expert has this weight."""
        return "expert" in placeholders_of(self.name)

    def is_joined(self, template: str) -> bool:
        """Return whether a Hugging Face tensor of this name holds the weight of all experts of a layer."""
        return self.per_expert and "expert" not in placeholders_of(template)

    @property
    def predicts(self) -> bool:
        """Whether each layer that predicts further tokens has this weight."""
        return self.copy_of is not None or "mtp" in placeholders_of(self.name)

    @property
    def per_layer(self) -> bool:
        """Whether each layer of the decoder, or each that predicts further tokens, has this weight."""
        return self.predicts or "layer" in placeholders_of(self.name)

    def layers(self, dims: Dims) -> range:
        """Return the layers that may have this weight: those of the decoder, or those that predict further tokens."""
        return dims.predicting if self.predicts else range(dims.num_layers)

    def exists(self, dims: Dims) -> bool:
        """Return whether a model of these sizes has the weight in any layer."""
        if self.predicts and not dims.mtp_num_layers:
            return False
        return self.when(dims) and (self.part is None or any(self.in_layer(at, dims) for at in self.layers(dims)))

    def in_layer(self, layer: int, dims: Dims) -> bool:
        """Return whether a layer has the weight."""
        return self.part is None or self.part in dims.parts_of(layer)

    def at(self, layer: int | None, dims: Dims) -> list[Index]:
        """Return the indices of the weight in a layer: one, one for each expert, or none."""
        if layer is not None and not self.in_layer(layer, dims):
            return []
        mtp = layer - dims.num_layers if self.predicts and layer is not None else None
        if not self.per_expert:
            return [Index(layer, None, mtp)]
        return [Index(layer, expert, mtp) for expert in range(dims.num_experts or 0)]


class Item(NamedTuple):
    """One tensor of a model: a weight, its index, and which of its states."""

    weight: Weight
    at: Index
    state: str = PARAM

    def __str__(self) -> str:
        name = spell(self.weight.name, self.at)
        return name if self.state == PARAM else f"{name} ({self.state})"


Row = Callable[..., Weight]


def _row(shard: Shard, *, in_vocab: bool = False) -> Row:
    def make(
        mcore: str,
        shape: str,
        *hf: str,
        pack: Pack = Same(),
        when: Condition = always,
        part: str | None = None,
        also: tuple[Spelling, ...] = (),
        less: float = 0.0,
    ) -> Weight:
        return Weight(mcore, tuple(shape.split()), hf, shard, pack, when, in_vocab, part=part, also=also, less=less)

    return make


# The first word of a row is Megatron's name for the way the weight is sharded.
replicated, column, row, gated_column = map(_row, (REPLICATED, COLUMN, ROW, GATED_COLUMN))
vocab = _row(COLUMN, in_vocab=True)


def segmented(
    mcore: str,
    shape: str,
    *hf: str,
    segments: Mapping[str, str],
    pack: Pack = Same(),
    part: str | None = None,
) -> Weight:
    """Return a weight of named segments, concatenated along the first dimension, each of which is sharded separately.

    Args:
        segments: the size of each segment, in the words of `Dims.size`, by its name in `torch_dist`.
    """
    shard = Shard(0, tuple(segments.values()), tuple(segments))
    return Weight(mcore, tuple(shape.split()), hf, shard, pack, part=part)


def buffer(mcore: str, shape: str, *hf: str, part: str | None = None) -> Weight:
    """Return a tensor that no optimizer trains, replicated on every rank."""
    return Weight(mcore, tuple(shape.split()), hf, part=part, trained=False)


def copy_of(weight: Weight, hf: str) -> Weight:
    """Return a Hugging Face tensor that repeats a weight in each layer that predicts further tokens."""
    return Weight(None, weight.shape, (hf,), when=weight.when, vocab=weight.vocab, copy_of=weight.mcore)


def must_be_zero(hf: str, shape: str, *, when: Condition = always) -> Weight:
    """Return a tensor that Hugging Face has and Megatron cannot hold: an import checks that it is zero,
    and an export writes zeros.
    """
    return Weight(None, tuple(shape.split()), (hf,), when=when)


@dataclass(frozen=True)
class Family:
    """A model family: its rows in the order of the forward pass, and its configuration mapping.

    `architectures` are the values of `architectures` in `config.json` that the family reads. `ignore` lists Hugging
    Face tensors that are not weights (mask buffers). `optional_prefix` may be absent from Hugging Face names.
    `prevalence` ranks how widely an architecture is supported: if a Megatron model fits several families, the highest
    is chosen.
    """

    name: str
    architectures: tuple[str, ...]
    config: ConfigMapping
    weights: tuple[Weight, ...]
    ignore: tuple[str, ...] = ()
    optional_prefix: str = ""
    prevalence: int = 0

    def instances(self, dims: Dims) -> Iterator[tuple[Weight, Index]]:
        """Yield every weight that a model of these sizes has, layer by layer, in the order of the forward pass."""
        rows = (weight for weight in self.weights if weight.exists(dims))
        for (per_layer, _), block in groupby(rows, key=lambda weight: (weight.per_layer, weight.predicts)):
            weights = list(block)
            for layer in weights[0].layers(dims) if per_layer else [None]:
                for weight in weights:
                    yield from ((weight, at) for at in weight.at(layer, dims))

    def original_of(self, item: Item) -> Item:
        """Return the weight of which a Hugging Face tensor is a copy; the item itself if it is not a copy."""
        copied = item.weight.copy_of
        if copied is None:
            return item
        return Item(next(weight for weight in self.weights if weight.mcore == copied), Index(), item.state)

    def shape(self, weight: Weight, dims: Dims) -> Shape:
        """Return the shape of the global tensor, without vocabulary padding."""
        return dims.shape(weight.shape)
