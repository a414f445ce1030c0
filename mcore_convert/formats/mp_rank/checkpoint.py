"""A checkpoint of rank files: the places of all copies of a weight's parts, and of its states."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mcore_convert.errors import UnreadableCheckpoint
from mcore_convert.formats.base import Checkpoint, Common, Findings, Side, Training
from mcore_convert.formats.megatron.flat import slots_in_global
from mcore_convert.formats.megatron.random_states import KEY, random_states
from mcore_convert.formats.megatron.remainders import are_gathered
from mcore_convert.formats.megatron.run_directory import carried_in
from mcore_convert.formats.megatron.tolerances import tolerance_of
from mcore_convert.formats.mp_rank import optimizer as mp_rank_optimizer
from mcore_convert.formats.mp_rank.optimizer import Proof
from mcore_convert.formats.mp_rank.places import Place, Places
from mcore_convert.formats.mp_rank.rank_file import LocalTensor, RankFile
from mcore_convert.formats.random_states import RandomStates
from mcore_convert.formats.traits import LayerSpec, Storage
from mcore_convert.spec.dims import Dims
from mcore_convert.spec.family import Item
from mcore_convert.spec.gpt import EMBEDDING
from mcore_convert.spec.holding import Holding
from mcore_convert.spec.layout import Layout, Rank, Stage
from mcore_convert.spec.names import MASTER, MOMENTS, PARAM
from mcore_convert.spec.releases import NEWEST, Release
from mcore_convert.storage.joining import join_views
from mcore_convert.storage.rounding import Tolerance
from mcore_convert.storage.views import Slot, Sum, TensorMeta, View


@dataclass(frozen=True)
class MpRankCheckpoint(Checkpoint):
    """An open or a reserved directory of rank files.

    `implementation` and `experts` are constants of `formats.megatron.modules`; `args` are the run's arguments, with the
    user's overrides.
    """

    files: Mapping[Rank, RankFile]
    args: Mapping[str, Any]
    layout: Layout
    layers: Mapping[Stage, range]
    implementation: str
    experts: str
    norm_state: bool = False  # whether the final norm has an `_extra_state`
    release: Release = NEWEST  # release of the modules, as far as it determines their sharding
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
        place = self._places(dims).of(item).parts[0]
        held = self._states[place.rank][place.chunk].get(place.name)
        return held is None or item.state in held  # without any state it is missing

    @property
    def optimizer_keys(self) -> list[str]:
        """Ranks with optimizer state."""
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
        """Number of rows of the embedding, including padding.

        Raises:
            UnreadableCheckpoint: there is no embedding.
        """
        local = self._first.chunks[0].get(EMBEDDING)
        if local is None or not local.view.shape:
            raise UnreadableCheckpoint(f"`{self._first.path}` has no `{EMBEDDING}`")
        return local.view.shape[0] * self.layout.tp

    @cached_property
    def common(self) -> Common:
        """Content other than tensors, from the file of the first rank."""
        state = {key: value for key, value in self._first.tree.items() if not re.fullmatch(r"model\d*", key)}
        iteration = self._first.iteration
        return Common(self.args, iteration if isinstance(iteration, int) else None, state)

    @property
    def _first(self) -> RankFile:
        return self.files[Rank()]

    def locate(self, item: Item, dims: Dims, findings: Findings) -> list[Slot]:
        """Return the boxes of one global tensor; copies on other ranks count as used,
        and `replicas` yields them.
        """
        if item.weight.mcore is None:
            return []
        places = self._places(dims)
        parts, copies = places.of(item)
        for place in copies:
            local = self._find(place)
            if local is not None:
                findings.used.add(self._label(place) + local.key)
        rows = self._rows(parts) if item.weight.vocab else None
        return [slot for place in parts for slot in self._slots(item, place, places, rows, findings)]

    def replicas(self, item: Item, dims: Dims) -> Iterable[tuple[Slot, str]]:
        if item.weight.mcore is None:
            return
        places = self._places(dims)
        parts, copies = places.of(item)
        rows = self._rows(parts) if copies and item.weight.vocab else None
        for place in copies:
            for slot in self._slots(item, place, places, rows, Findings()):
                yield slot, self._key(place)

    def proofs(self) -> Iterator[Proof]:
        """Yield for every parameter its fp32 master copy, which must equal the parameter when cast to its dtype."""
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
        """Return a complete state: a master copy stored as a remainder is joined with its weight."""
        return join_views(view, weight) if state == MASTER and weight.dtype == "bfloat16" and self._gathered else view

    @cached_property
    def _gathered(self) -> bool:
        """Whether the distributed optimizer's master copies are remainders in fp32; never so in reserved files."""
        if self._first.reserved_buffers is not None or self._first.distributed is None:
            return False
        held = (states for chunks in self._states.values() for chunk in chunks for states in chunk.values())
        return are_gathered(self.args, (states[MASTER] for states in held if MASTER in states))

    def _places(self, dims: Dims) -> Places:
        """Return the places of a model of these sizes."""
        known = self._places_of.get(id(dims))  # unique, since the places keep `dims` alive
        if known is None:
            spec = self.layer_spec
            known = self._places_of[id(dims)] = Places(Holding(self.layout, self.layers), spec, self.release, dims)
        return known

    @cached_property
    def _places_of(self) -> dict[int, Places]:
        return {}

    def _label(self, place: Place) -> str:
        return self.files[place.rank].label(place.chunk)

    def _key(self, place: Place) -> str:
        local = self._find(place)
        return self._label(place) + (place.name if local is None else local.key)

    def _find(self, place: Place) -> LocalTensor | None:
        return self.files[place.rank].chunks[place.chunk].get(place.name)

    def _rows(self, parts: Sequence[Place]) -> int | None:
        """Return the number of rows of a vocabulary tensor including padding: the sum over the ranks."""
        local = self._find(parts[0])
        return None if local is None or not local.view.shape else local.view.shape[0] * self.layout.tp

    def _slots(self, item: Item, place: Place, places: Places, rows: int | None, findings: Findings) -> list[Slot]:
        file = self.files[place.rank]
        parameter = file.chunks[place.chunk].get(place.name)
        key = file.label(place.chunk) + (place.name if parameter is None else parameter.key)
        if parameter is None:  # without it the padded shape is unknown
            findings.expect(key, None, ())
            return []
        local = places.local(item, place.rank, rows)
        if not findings.expect(key, parameter.meta, local.shape):
            return []
        view, state = parameter.view, item.state
        if state != PARAM:
            states = self._states[place.rank][place.chunk].get(place.name, {})
            if state in states:
                view = self._whole(state, states[state], view)
            elif state != MASTER or view.dtype != "float32":  # a parameter in fp32 is its own master copy
                findings.missing.append(f"{key} ({state})")
                return []
        return list(slots_in_global(parameter.arrange(view), local))
