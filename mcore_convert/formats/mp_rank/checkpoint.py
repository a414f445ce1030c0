"""A checkpoint of rank files: where each copy of each part of a weight is, and its states."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mcore_convert.errors import UnreadableCheckpoint
from mcore_convert.formats.base import Checkpoint, Common, Findings, Side, Training
from mcore_convert.formats.megatron.flat import local_of, slots_in_global
from mcore_convert.formats.megatron.modules import name_in_module, shard_of
from mcore_convert.formats.megatron.random_states import KEY, random_states
from mcore_convert.formats.megatron.remainders import are_gathered
from mcore_convert.formats.megatron.run_directory import carried_in
from mcore_convert.formats.megatron.tolerances import tolerance_of
from mcore_convert.formats.mp_rank import optimizer as mp_rank_optimizer
from mcore_convert.formats.mp_rank.optimizer import Proof
from mcore_convert.formats.mp_rank.rank_file import LocalTensor, RankFile
from mcore_convert.formats.random_states import RandomStates
from mcore_convert.formats.traits import LayerSpec, Storage
from mcore_convert.spec.dims import Dims
from mcore_convert.spec.family import Item, Weight
from mcore_convert.spec.gpt import EMBEDDING
from mcore_convert.spec.holding import Holding
from mcore_convert.spec.layout import Layout, Rank, Stage
from mcore_convert.spec.names import MASTER, MOMENTS, PARAM, spell
from mcore_convert.spec.releases import NEWEST, Release
from mcore_convert.spec.shard import Shape, Shard
from mcore_convert.storage.joining import join_views
from mcore_convert.storage.rounding import Tolerance
from mcore_convert.storage.views import Slot, Sum, TensorMeta, View


@dataclass(frozen=True)
class Place:
    """Where a copy of a local tensor is: the rank, its model chunk, and the name in its modules."""

    rank: Rank
    chunk: int
    name: str


@dataclass(frozen=True)
class MpRankCheckpoint(Checkpoint):
    """An open or a reserved directory of rank files.

    `implementation` and `experts` are the words of `formats.megatron.modules`; `args` are those of the run, with what
    the user gave in their stead.
    """

    files: Mapping[Rank, RankFile]
    args: Mapping[str, Any]
    layout: Layout
    layers: Mapping[Stage, range]
    implementation: str
    experts: str
    norm_state: bool = False  # whether the norm at the end has an `_extra_state`
    release: Release = NEWEST  # whose modules these are, as far as it decides how they are cut
    format: str = "torch"
    side: Side = Side.MEGATRON

    @cached_property
    def tensors(self) -> Mapping[str, TensorMeta]:
        return {
            f"{file.label(number)}{local.key}": local.meta
            for file in self.files.values()
            for number, chunk in enumerate(file.chunks)
            for local in chunk.values()
        }

    @property
    def states(self) -> tuple[str, ...]:
        return (PARAM, *mp_rank_optimizer.states_in(self._first))

    def tolerance(self, item: Item) -> Tolerance | None:
        return tolerance_of(self.args, item.weight, item.at)

    def keeps(self, item: Item, dims: Dims) -> bool:
        if item.state not in MOMENTS or item.weight.mcore is None:
            return True
        place = self._places(item, dims)[0]
        held = self._states[place.rank][place.chunk].get(place.name)
        return held is None or item.state in held  # what has none at all is missing

    @property
    def optimizer_keys(self) -> list[str]:
        """The ranks that hold optimizer state."""
        return [f"{file.name}: optimizer" for file in self.files.values() if mp_rank_optimizer.states_in(file)]

    @cached_property
    def training(self) -> Training | None:
        return mp_rank_optimizer.training_of(self._first) if mp_rank_optimizer.states_in(self._first) else None

    @property
    def random_states(self) -> RandomStates | None:
        ep = self.layout.ep
        axes = ("pp", "tp") if ep == 1 else ("pp", "tp", "ep")
        sizes = (self.layout.pp, self.layout.tp, ep)[: len(axes)]
        contents = {(rank.pp, rank.tp, rank.ep)[: len(axes)]: file.tree.get(KEY) for rank, file in self.files.items()}
        return random_states(contents, axes, sizes, ep)

    @property
    def matched_by_order(self) -> bool:
        return True

    @property
    def companions(self) -> Path | None:
        return carried_in(self.path)

    @property
    def saved_layout(self) -> Layout:
        return self.layout

    @property
    def layer_spec(self) -> LayerSpec:
        return LayerSpec(self.implementation, self.experts)

    def storage(self) -> Storage:
        training = self.training
        kind = None if training is None else "distributed" if training.distributed else "plain"
        return Storage(len(self.files), optimizer=kind)

    @property
    def sums(self) -> Iterator[Sum]:
        for file in self.files.values():
            yield from file.sums

    @property
    def embedding_rows(self) -> int:
        """Rows of the embedding with its padding.

        Raises:
            UnreadableCheckpoint: there is none.
        """
        local = self._first.chunks[0].get(EMBEDDING)
        if local is None or not local.view.shape:
            raise UnreadableCheckpoint(f"`{self._first.path}` has no `{EMBEDDING}`")
        return local.view.shape[0] * self.layout.tp

    @cached_property
    def common(self) -> Common:
        """What the files hold beside tensors, as the first rank has it."""
        state = {key: value for key, value in self._first.tree.items() if not re.fullmatch(r"model\d*", key)}
        iteration = self._first.iteration
        return Common(self.args, iteration if isinstance(iteration, int) else None, state)

    @property
    def _first(self) -> RankFile:
        return self.files[Rank()]

    @cached_property
    def _holding(self) -> Holding:
        return Holding(self.layout, self.layers)

    def locate(self, item: Item, dims: Dims, findings: Findings) -> list[Slot]:
        """Return the boxes of one global tensor; what other ranks hold again counts as used,
        and is given by `replicas`.
        """
        if item.weight.mcore is None:
            return []
        places = self._places(item, dims)
        findings.used |= {self._key(place) for place in self._copies(item, dims) if self._find(place) is not None}
        rows = self._rows(item.weight, places) if item.weight.vocab else None
        return [slot for place in places for slot in self._slots(item, place, dims, rows, findings)]

    def replicas(self, item: Item, dims: Dims) -> Iterable[tuple[Slot, str]]:
        if item.weight.mcore is None:
            return
        rows = self._rows(item.weight, self._places(item, dims)) if item.weight.vocab else None
        for place in self._copies(item, dims):
            for slot in self._slots(item, place, dims, rows, Findings()):
                yield slot, self._key(place)

    def proofs(self) -> Iterator[Proof]:
        """For every parameter its fp32 master copy, which cast to the model's dtype must equal the parameter."""
        for rank, file in self.files.items():
            for number, chunk in enumerate(file.chunks):
                for name, states in self._states[rank][number].items():
                    if MASTER in states:
                        local = chunk[name]
                        yield Proof(
                            self._whole(MASTER, states[MASTER], local.view),
                            local.view,
                            f"{file.label(number)}{local.key}",
                        )

    @cached_property
    def _states(self) -> Mapping[Rank, Sequence[mp_rank_optimizer.ChunkStates]]:
        return {rank: mp_rank_optimizer.find_states(file, self.args) for rank, file in self.files.items()}

    def _whole(self, state: str, view: View, weight: View) -> View:
        """Return a state in whole: a master copy that is kept as a remainder is joined with its weight."""
        return join_views(view, weight) if state == MASTER and weight.dtype == "bfloat16" and self._gathered else view

    @cached_property
    def _gathered(self) -> bool:
        """Whether the distributed optimizer's master copies are remainders in fp32; what is written here has none."""
        if self._first.reserved_buffers is not None or self._first.distributed is None:
            return False
        held = (states for chunks in self._states.values() for chunk in chunks for states in chunk.values())
        return are_gathered(self.args, (states[MASTER] for states in held if MASTER in states))

    def _places(self, item: Item, dims: Dims) -> list[Place]:
        """Return where the first copy of each part is: one place for each tensor rank,
        or one where the weight is not cut.
        """
        stage, ep, name = self._position(item, dims)
        return [Place(rank, stage.vpp, name) for rank in self._first_ranks(stage.pp, ep, self._shard(item.weight).dim)]

    def _shard(self, weight: Weight) -> Shard:
        """Return how the modules cut a weight."""
        return shard_of(weight, self.implementation, self.release)

    def _copies(self, item: Item, dims: Dims) -> list[Place]:
        """Return where further copies are: on other tensor or expert ranks,
        and a tied embedding's on the last stage.
        """
        stage, ep, name = self._position(item, dims)
        ends = [(stage, name)]
        if item.weight.mcore == EMBEDDING:
            ends += [(at, copied_as) for copied_as, at in self._holding.copies_of_embedding(dims).items()]
        first = self._first_ranks(stage.pp, ep, self._shard(item.weight).dim)
        return [
            Place(rank, end.vpp, end_name)
            for end, end_name in ends
            for rank in self._ranks[end.pp, ep]
            if end is not stage or rank not in first
        ]

    def _first_ranks(self, pp: int, ep: int | None, dim: int | None) -> list[Rank]:
        """Return the first rank with each part of a weight that is cut along `dim`, in the order of the parts."""
        if (pp, ep, dim) not in self._first_by_cut:
            first: dict[int, Rank] = {}
            for rank in self._ranks[pp, ep]:
                _, part = self.layout.cut_at(rank, is_expert=ep is not None)
                first.setdefault(part if dim is not None else 0, rank)
            self._first_by_cut[pp, ep, dim] = [rank for _, rank in sorted(first.items())]
        return self._first_by_cut[pp, ep, dim]

    @cached_property
    def _first_by_cut(self) -> dict[tuple[int, int | None, int | None], list[Rank]]:
        return {}

    @cached_property
    def _ranks(self) -> Mapping[tuple[int, int | None], list[Rank]]:
        """The ranks of each pipeline stage, all of them under None, and those with each expert rank."""
        ranks: dict[tuple[int, int | None], list[Rank]] = {}
        for rank in self.layout.ranks():
            ranks.setdefault((rank.pp, None), []).append(rank)
            ranks.setdefault((rank.pp, rank.ep), []).append(rank)
        return ranks

    def _position(self, item: Item, dims: Dims) -> tuple[Stage, int | None, str]:
        """Return the stage of a weight, its expert rank where it has one, and its name in the modules there."""
        assert item.weight.mcore is not None
        stage, ep, local = self._holding.home_of(item.weight, item.at, dims)
        return stage, ep, spell(name_in_module(item.weight.mcore, self.implementation, self.experts), local)

    def _key(self, place: Place) -> str:
        file = self.files[place.rank]
        local = self._find(place)
        return f"{file.label(place.chunk)}{place.name if local is None else local.key}"

    def _find(self, place: Place) -> LocalTensor | None:
        return self.files[place.rank].chunks[place.chunk].get(place.name)

    def _rows(self, weight: Weight, places: list[Place]) -> int | None:
        """Return the rows of a vocabulary tensor with its padding: those that the ranks hold together."""
        local = self._find(places[0])
        return None if local is None or not local.view.shape else local.view.shape[0] * self.layout.tp

    def _slots(self, item: Item, place: Place, dims: Dims, rows: int | None, findings: Findings) -> list[Slot]:
        weight, _, state = item
        key, parameter = self._key(place), self._find(place)
        if parameter is None:  # nothing that its shape, which may be without padding, could be cut by
            findings.expect(key, None, ())
            return []
        shape: Shape = dims.shape(weight.shape)
        if rows is not None and rows >= shape[0]:
            shape = (rows, *shape[1:])
        shard = dims.sized(self._shard(weight))
        local = local_of(shard, shape, *self.layout.cut_at(place.rank, is_expert=item.at.expert is not None))
        if not findings.expect(key, parameter.meta, local.shape):
            return []
        view = parameter.view
        if state != PARAM:
            states = self._states[place.rank][place.chunk].get(place.name, {})
            if state in states:
                view = self._whole(state, states[state], view)
            elif state != MASTER or view.dtype != "float32":  # a parameter in fp32 is its own master copy
                findings.missing.append(f"{key} ({state})")
                return []
        return list(slots_in_global(parameter.arrange(view), local))
