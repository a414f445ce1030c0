"""Reserving rank files for a layout: the directory that Megatron-LM itself would have saved there."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_convert.formats import mp_rank_layout
from mcore_convert.formats.base import Reservation, Training
from mcore_convert.formats.flat import local_of
from mcore_convert.formats.modules import (
    EXPERT,
    SEQUENTIAL,
    TRANSFORMER_ENGINE,
    in_module_order,
    name_in_module,
)
from mcore_convert.formats.mp_rank_checkpoint import EMBEDDING, HEAD, MpRankCheckpoint
from mcore_convert.formats.mp_rank_files import DISTRIBUTED_FILE, MODEL_FILE, Chunk, LocalTensor, RankFile
from mcore_convert.formats.mp_rank_optimizer_writer import Groups, buffers_of, groups_of, optimizer_of
from mcore_convert.formats.torch_dist import TRACKER
from mcore_convert.formats.torch_dist_writer import EXTRA_STATE, padded_shape
from mcore_convert.formats.torch_tree import Hole, reserve_tree
from mcore_convert.spec.dims import Dims
from mcore_convert.spec.family import Family, Item, Weight
from mcore_convert.spec.layout import Layout, Rank, Stage
from mcore_convert.spec.names import MASTER, Index, spell
from mcore_convert.tensors import TensorMeta, View

State = dict[str, Hole | None]  # the state dict of a model chunk, its tensors not filled


@dataclass(frozen=True)
class _Model:
    """What is the same on all ranks."""

    rows: Sequence[Weight]
    dims: Dims
    dtype_of: Mapping[Item, str]
    layout: Layout
    implementation: str
    experts: str

    def state(self, rank: Rank, vpp: int) -> State:
        """The state dict of a model chunk: its tensors in the order of the modules, each module's extra state last."""
        shared = Hole(TensorMeta((len(EXTRA_STATE),), "uint8"), EXTRA_STATE)
        extra = shared if self.implementation == TRANSFORMER_ENGINE else None
        state: State = {}
        stage = Stage(vpp, rank.pp)
        entries = list(self._entries(stage, rank.ep))
        for number, (name, weight, at) in enumerate(entries):
            module, _, _ = name.rpartition(".")
            if module.endswith("self_attention.linear_proj") and extra is not None and name.endswith("weight"):
                state[f"{module.removesuffix('linear_proj')}core_attention._extra_state"] = extra
            cut = self.layout.cut_at(rank, is_expert=at.expert is not None)
            shape = local_of(weight.shard, padded_shape(weight, self.dims), *cut).shape
            state[name] = Hole(TensorMeta(shape, self.dtype_of[Item(weight, at)]))
            is_last = number + 1 == len(entries) or entries[number + 1][0].rpartition(".")[0] != module
            if is_last and self._has_extra_state(module):
                state[f"{module}._extra_state"] = extra
        if stage == self._last:
            state["output_layer._extra_state"] = None
        return state

    @property
    def _last(self) -> Stage:
        return Stage(self.layout.num_virtual_stages - 1, self.layout.pp - 1)

    def _has_extra_state(self, module: str) -> bool:
        """Every linear layer has one, and with Transformer Engine every norm that is a module of its own."""
        last = module.rpartition(".")[2]
        norms = self.implementation == TRANSFORMER_ENGINE and last.endswith("layernorm")
        return last.startswith("linear_") or norms

    def _entries(self, stage: Stage, ep: int) -> Iterator[tuple[str, Weight, Index]]:
        """The tensors of a chunk as its modules register them."""
        for per_layer, group in itertools.groupby(self.rows, key=lambda weight: weight.per_layer):
            rows = list(group)
            if per_layer:
                for local, layer in enumerate(self.layout.stages(self.dims.num_layers)[stage]):
                    held = [weight for weight in rows if weight.in_layer(layer, self.dims)]
                    yield from self._layer(held, local, layer, ep)
                continue
            for weight in rows:
                assert weight.mcore is not None
                is_first = weight.mcore.startswith("embedding.")
                if stage == (Stage(0, 0) if is_first else self._last):
                    yield weight.mcore, weight, Index()
                if weight.mcore == EMBEDDING:
                    embedding = weight
        if stage == self._last and self.dims.tied and stage.pp > 0:
            yield HEAD, embedding, Index()

    def _layer(self, rows: list[Weight], local: int, layer: int, ep: int) -> Iterator[tuple[str, Weight, Index]]:
        """The tensors of a layer. Experts follow one another, in each linear layer where those are grouped."""

        def module(weight: Weight) -> str:
            assert weight.mcore is not None
            if EXPERT not in weight.mcore:
                return weight.mcore
            return EXPERT if self.experts == SEQUENTIAL else weight.mcore.rpartition(".")[0]

        for name, group in itertools.groupby(rows, key=module):
            members = list(group)
            if EXPERT not in name:
                yield from ((self._name(weight, Index(local)), weight, Index(layer)) for weight in members)
                continue
            for number, expert in enumerate(self.layout.experts(self.dims.num_experts or 0, ep)):
                for weight in members:
                    yield self._name(weight, Index(local, number)), weight, Index(layer, expert)

    def _name(self, weight: Weight, at: Index) -> str:
        assert weight.mcore is not None
        return spell(name_in_module(weight.mcore, self.implementation, self.experts), at)


def reserve(
    path: Path,
    family: Family,
    dims: Dims,
    dtype_of: Mapping[Item, str],
    layout: Layout,
    *,
    iteration: int | None,
    common: Mapping[str, Any],
    training: Training | None,
    implementation: str,
    experts: str,
) -> tuple[MpRankCheckpoint, Reservation]:
    """Lay out the files of every rank, with the tracker file.

    Args:
        path: the directory that `--load` will name.
        dtype_of: the dtype of every weight that the model has, and of the optimizer's states of each.
        iteration: number of the `iter_*` directory; None for `release`.
        common: what every file holds beside tensors; its `args` are a dict and describe `layout`.
        training: the optimizer's groups and the scheduler; None without optimizer state.
        implementation, experts: whose names the modules have, in the words of `formats.modules`.

    Raises:
        LayoutError: parts of an expert would share a directory.
        MappingError: the optimizer's groups do not deal out the parameters.
    """
    if dims.num_experts:
        mp_rank_layout.check_expert_cut(layout)
    name = "release" if iteration is None else f"iter_{iteration:07d}"
    reservation = Reservation(path)
    rows = in_module_order([w for w in family.weights if w.mcore is not None and w.exists(dims)], implementation)
    model = _Model(rows, dims, dtype_of, layout, implementation, experts)
    apart = bool(dims.num_experts) and layout.ep > 1
    chained = None if training is None else groups_of(training, rows, apart=apart)
    masters = any(item.state == MASTER for item in dtype_of)
    files = {
        rank: _reserve_rank(path / name, rank, model, common, training, chained, masters, reservation)
        for rank in layout.ranks()
    }
    reservation.texts = {path / TRACKER: (name if iteration is None else str(iteration)).encode()}
    stages = layout.stages(dims.num_layers)
    return MpRankCheckpoint(path / name, files, common["args"], layout, stages, implementation, experts), reservation


def _reserve_rank(
    folder: Path,
    rank: Rank,
    model: _Model,
    common: Mapping[str, Any],
    training: Training | None,
    chained: list[Groups] | None,
    masters: bool,
    reservation: Reservation,
) -> RankFile:
    """Lay out the files of one rank."""
    name = mp_rank_layout.rank_name(rank, model.layout)
    path = folder / name / MODEL_FILE
    count = model.layout.num_virtual_stages
    models = ["model"] if count == 1 else [f"model{vpp}" for vpp in range(count)]
    states: dict[str, Any] = {key: model.state(rank, vpp) for vpp, key in enumerate(models)}
    args = common["args"]
    tree: dict[str, Any] = {**common, "args": argparse.Namespace(**args), **states}
    buffers = None
    if training is not None and chained is not None:
        planned = RankFile(name, path, {}, tuple(_planned(path, state) for state in states.values()))
        tree["optimizer"] = optimizer_of(planned, chained, training, args, masters=masters)
        if training.scheduler is not None:
            tree["opt_param_scheduler"] = dict(training.scheduler)
        tree |= {key: value for key, value in training.rest.items() if key != "grad_scaler"}
        if training.distributed:
            first = next(each for each in model.layout.ranks() if (each.tp, each.pp) == (rank.tp, rank.pp))
            content = buffers_of(planned, rank, len(chained), args, saves_dense=rank == first)
            buffers = reserve_tree(path.with_name(DISTRIBUTED_FILE), content, reservation)
    laid_out = reserve_tree(path, tree, reservation)
    chunks = tuple(_chunk(laid_out.pop(key)) for key in models)
    return RankFile(name, path, laid_out, chunks, buffers)


def _planned(path: Path, state: State) -> Chunk:
    """A chunk before it is laid out: its tensors' shapes and dtypes count, their offsets do not."""
    held = {key: hole for key, hole in state.items() if hole is not None and hole.content is None}
    return {key: LocalTensor(key, View.of(path, 0, hole.meta)) for key, hole in held.items()}


def _chunk(views: Mapping[str, View | None]) -> Chunk:
    return {
        key: LocalTensor(key, view)
        for key, view in views.items()
        if view is not None and not key.endswith("_extra_state")
    }
