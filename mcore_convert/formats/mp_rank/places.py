"""Places of the tensors of a model in rank files: the ranks that hold a weight, and its names there.

Places are requested for every expert of every layer, so common results are cached.
"""

from __future__ import annotations

from typing import NamedTuple

from mcore_convert.formats.megatron.flat import Local, local_of
from mcore_convert.formats.megatron.modules import name_in_module, shard_of
from mcore_convert.formats.traits import LayerSpec
from mcore_convert.spec.dims import Dims
from mcore_convert.spec.family import Item, Weight
from mcore_convert.spec.gpt import EMBEDDING
from mcore_convert.spec.holding import Holding
from mcore_convert.spec.layout import Rank
from mcore_convert.spec.names import spell
from mcore_convert.spec.releases import Release
from mcore_convert.spec.shard import Shape, Shard


class Place(NamedTuple):
    """Place of a copy of a local tensor: the rank, its model chunk, and the name in its modules."""

    rank: Rank
    chunk: int
    name: str


class Holders(NamedTuple):
    """Places of a weight: the first copy of each part, and further copies.

    There is one part per tensor rank, or one if the weight is not sharded. Copies are on other tensor or expert ranks,
    and those of a tied embedding on the last stage.
    """

    parts: list[Place]
    copies: list[Place]


class _Row(NamedTuple):
    """Common properties of all tensors of a row: name template in the modules, shape and shard."""

    template: str
    shape: Shape
    shard: Shard
    locals: dict[tuple[Rank, int | None], Local]


class Places:
    """Places of a model of given sizes on the ranks of a layout."""

    def __init__(self, holding: Holding, spec: LayerSpec, release: Release, dims: Dims) -> None:
        self.dims = dims
        self._holding, self._layout, self._spec, self._release = holding, holding.layout, spec, release
        self._rows: dict[Weight, _Row] = {}
        self._latest: tuple[Item, Holders] | None = None  # requested several times in a row
        self._ranks: dict[tuple[int, int | None], list[Rank]] = {}  # of a stage; with None for all expert ranks
        for rank in self._layout.ranks():
            self._ranks.setdefault((rank.pp, None), []).append(rank)
            self._ranks.setdefault((rank.pp, rank.ep), []).append(rank)
        self._shares: dict[tuple[int, int | None, int | None], tuple[list[Rank], list[Rank]]] = {}

    def of(self, item: Item) -> Holders:
        """Return the holders of a weight that Megatron has."""
        latest = self._latest
        if latest is None or latest[0] is not item:
            latest = self._latest = item, self._holders(item)
        return latest[1]

    def local(self, item: Item, rank: Rank, rows: int | None) -> Local:
        """Return the part of a weight on a rank.

        Args:
            rows: number of rows of a vocabulary tensor including padding.
        """
        row = self._row(item.weight)
        local = row.locals.get((rank, rows))
        if local is None:
            shape = row.shape if rows is None else (max(rows, row.shape[0]), *row.shape[1:])
            cut = self._layout.cut_at(rank, is_expert=item.at.expert is not None)
            local = row.locals[rank, rows] = local_of(row.shard, shape, *cut)
        return local

    def _holders(self, item: Item) -> Holders:
        weight = item.weight
        template, _, shard, _ = self._row(weight)
        (vpp, pp), ep, local = self._holding.home_of(weight, item.at, self.dims)
        name = spell(template, local)
        first, others = self._shared(pp, ep, shard.dim)
        copies = [Place(rank, vpp, name) for rank in others]
        if weight.mcore == EMBEDDING:
            ends = self._holding.copies_of_embedding(self.dims).items()
            copies += [Place(rank, at.vpp, copied) for copied, at in ends for rank in self._ranks[at.pp, ep]]
        return Holders([Place(rank, vpp, name) for rank in first], copies)

    def _row(self, weight: Weight) -> _Row:
        row = self._rows.get(weight)
        if row is None:
            assert weight.mcore is not None
            spec = self._spec
            shard = self.dims.sized(shard_of(weight, spec.implementation, self._release))
            template = name_in_module(weight.mcore, spec.implementation, spec.experts)
            row = self._rows[weight] = _Row(template, self.dims.shape(weight.shape), shard, {})
        return row

    def _shared(self, pp: int, ep: int | None, dim: int | None) -> tuple[list[Rank], list[Rank]]:
        """Return the first rank with each part of a weight that is sharded along `dim`, in the order of the parts, and
        the ranks with further copies.
        """
        key = (pp, ep, dim)
        if key not in self._shares:
            first: dict[int, Rank] = {}
            for rank in self._ranks[pp, ep]:
                _, part = self._layout.cut_at(rank, is_expert=ep is not None)
                first.setdefault(part if dim is not None else 0, rank)
            others = [rank for rank in self._ranks[pp, ep] if rank not in first.values()]
            self._shares[key] = [rank for _, rank in sorted(first.items())], others
        return self._shares[key]
