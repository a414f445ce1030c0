"""Reserving rank files for a layout: the directory that Megatron-LM would save with that layout."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

from mcore_convert.errors import MappingError
from mcore_convert.formats.base import Training
from mcore_convert.formats.files.torch_tree import Hole, TreeLayout, reserve_tree
from mcore_convert.formats.format import Resume
from mcore_convert.formats.megatron.flat import local_of
from mcore_convert.formats.megatron.modules import (
    EXTRA_STATE,
    FINAL_NORMS,
    GROUPED,
    SEQUENTIAL,
    TRANSFORMER_ENGINE,
    has_extra_state,
    in_module_order,
    name_in_module,
    name_in_release,
    shard_of,
)
from mcore_convert.formats.megatron.random_states import KEY
from mcore_convert.formats.megatron.run_directory import TRACKER, name_of, tracker_bytes
from mcore_convert.formats.mp_rank import layout as mp_rank_layout
from mcore_convert.formats.mp_rank.checkpoint import MpRankCheckpoint
from mcore_convert.formats.mp_rank.optimizer_writer import buffers_of, groups_of, optimizer_of
from mcore_convert.formats.mp_rank.parameters import Groups, bucket_size_of, is_layer_wise
from mcore_convert.formats.mp_rank.rank_file import (
    DISTRIBUTED_FILE,
    MODEL_FILE,
    Chunk,
    LocalTensor,
    RankFile,
    name_of_weight,
)
from mcore_convert.formats.random_states import RandomStates
from mcore_convert.formats.request import Request, Reservation
from mcore_convert.formats.traits import LayerSpec
from mcore_convert.spec.dims import Dims
from mcore_convert.spec.family import Item, Weight
from mcore_convert.spec.holding import Holding
from mcore_convert.spec.layout import Layout, Rank, Stage
from mcore_convert.spec.names import MASTER, MOMENTS, PARAM, Index, spell
from mcore_convert.spec.releases import Release
from mcore_convert.spec.shard import Shape
from mcore_convert.storage.views import TensorMeta, View

State = dict[str, Hole | None]  # the state dict of a model chunk, with holes for its tensors


@dataclass(frozen=True)
class _Model:
    """Properties that are the same on all ranks."""

    rows: Sequence[Weight]
    dims: Dims
    dtype_of: Mapping[Item, str]
    layout: Layout
    implementation: str
    experts: str
    norm_state: bool
    release: Release
    common: Mapping[str, Any]
    random_states: RandomStates | None = None
    training: Training | None = None
    chained: list[Groups] | None = None

    def kind_of(self, rank: Rank) -> Rank:
        """Return the first rank whose file equals this one's except for values and `distrib_optim.pt`.

        Tensor ranks have equal shards of each tensor, and expert ranks number their experts from 0.
        """
        if self.random_states is not None:
            return rank
        return Rank(pp=rank.pp) if self._is_even else Rank(pp=rank.pp, ep=rank.ep)

    @cached_property
    def _is_even(self) -> bool:
        """Whether each row has one dtype, and the same states, in all layers and experts."""
        numbers = Counter((item.weight, item.state, dtype) for item, dtype in self.dtype_of.items())
        of_state = {(weight, state): number for (weight, state, _), number in numbers.items()}
        each = (of_state.get((weight, PARAM)) == number for (weight, _, _), number in numbers.items())
        return len(of_state) == len(numbers) and all(each)

    def chunks(self, rank: Rank) -> dict[str, State]:
        """Return the state dicts of a rank's model chunks, by their keys in its file."""
        count = self.layout.num_virtual_stages
        models = ["model"] if count == 1 else [f"model{vpp}" for vpp in range(count)]
        return {key: self.state(rank, vpp) for vpp, key in enumerate(models)}

    def lay_out(self, name: str, path: Path, rank: Rank) -> _LaidOut:
        """Lay out the file of a rank, which is the same for all ranks of its kind."""
        states = self.chunks(rank)
        random = {} if self.random_states is None else {KEY: self.random_states.of_rank(rank)}
        tree: dict[str, Any] = {**self.common, **random, "args": argparse.Namespace(**self.common["args"]), **states}
        moments = (self.moments(rank, vpp) for vpp in range(len(states)))
        held = map(_planned, repeat(path), states.values(), moments) if self.training is not None else ()
        planned = RankFile(name, path, {}, tuple(held))
        if self.training is not None and self.chained is not None:
            masters = any(item.state == MASTER for item in self.dtype_of)
            args, release = self.common["args"], self.release
            tree["optimizer"] = optimizer_of(
                planned, self.chained, self.training, args, masters=masters, release=release
            )
            if self.training.scheduler is not None:
                tree["opt_param_scheduler"] = dict(self.training.scheduler)
            tree |= {key: value for key, value in self.training.rest.items() if key != "grad_scaler"}
        return _LaidOut(planned, TreeLayout.of(tree), tuple(states))

    def state(self, rank: Rank, vpp: int) -> State:
        """Return the state dict of a model chunk: its tensors in the order of the modules,
        each module's extra state last.
        """
        shared = Hole(TensorMeta((len(EXTRA_STATE),), "uint8"), EXTRA_STATE)
        extra = shared if self.implementation == TRANSFORMER_ENGINE else None
        state: State = {}
        stage = Stage(vpp, rank.pp)
        entries = list(self._entries(stage, rank.ep))
        shapes: dict[Weight, Shape] = {}  # the same in all layers and experts
        for number, (name, weight, at) in enumerate(entries):
            module, _, _ = name.rpartition(".")
            if module.endswith("self_attention.linear_proj") and extra is not None and name.endswith("weight"):
                state[f"{module.removesuffix('linear_proj')}core_attention._extra_state"] = extra
            if weight not in shapes:
                cut = self.layout.cut_at(rank, is_expert=at.expert is not None)
                whole = self.dims.padded_shape(weight.shape, vocab=weight.vocab)
                shard = self.dims.sized(shard_of(weight, self.implementation, self.release))
                shapes[weight] = local_of(shard, whole, *cut).shape
            state[name] = Hole(TensorMeta(shapes[weight], self.dtype_of[Item(weight, at)]))
            is_last = number + 1 == len(entries) or entries[number + 1][0].rpartition(".")[0] != module
            if is_last and self._has_extra_state(module):
                state[f"{module}._extra_state"] = shared if module in FINAL_NORMS else extra
        if stage == self._holding.last:
            state["output_layer._extra_state"] = None
        return state

    def moments(self, rank: Rank, vpp: int) -> dict[str, tuple[str, ...]]:
        """Return the optimizer's moments of each tensor of a model chunk, by name."""
        return {
            name: tuple(moment for moment in MOMENTS if Item(weight, at, moment) in self.dtype_of)
            for name, weight, at in self._entries(Stage(vpp, rank.pp), rank.ep)
        }

    @cached_property
    def _holding(self) -> Holding:
        return Holding(self.layout, self.layout.stages(self.dims.num_layers))

    def _has_extra_state(self, module: str) -> bool:
        """Return whether a module has an extra state: linear layers, and with Transformer Engine separate norms.

        The final norm is Transformer Engine's if that is installed, in Megatron's own layer spec, too
        (`transformer_block.py`, `LayerNormImpl`).
        """
        if self.norm_state and module in FINAL_NORMS:
            return True
        return has_extra_state(module.rpartition(".")[2], norms=self.implementation == TRANSFORMER_ENGINE)

    def _entries(self, stage: Stage, ep: int) -> Iterator[tuple[str, Weight, Index]]:
        """Yield the tensors of a chunk in the order in which its modules register them."""
        for held in self._holding.held_on(self.rows, self.dims, stage, ep, grouped=self.experts == GROUPED):
            assert held.weight.mcore is not None
            template = held.copied_as or held.weight.mcore
            name = spell(name_in_module(template, self.implementation, self.experts), held.local)
            yield name_in_release(name, self.release), held.weight, held.at


def resume(training: Training, release: Release, args: Mapping[str, Any]) -> Resume:
    """Return Megatron-LM's arguments for the flat buffers of a distributed optimizer: their dtype and buckets."""
    if not training.distributed:
        return Resume()
    return Resume(
        {
            "accumulate_allreduce_grads_in_fp32": args.get("accumulate_allreduce_grads_in_fp32") is not False,
            "ddp_bucket_size": bucket_size_of(args) if args.get("overlap_grad_reduce") else None,
        }
    )


def reserve(request: Request) -> tuple[MpRankCheckpoint, Reservation]:
    """Lay out the files of every rank, and the tracker file. Modules are those of the request's layer spec.

    Raises:
        LayoutError: shards of an expert would share a directory.
        MappingError: the optimizer's groups do not cover the parameters, or it is the layer-wise optimizer.
    """
    path, dims, dtype_of, layout = request.path, request.dims, request.dtype_of, request.layout
    common, training = request.common, request.training
    spec = request.layer_spec or LayerSpec(TRANSFORMER_ENGINE, SEQUENTIAL)
    if training is not None and is_layer_wise(common["args"]):
        raise MappingError(
            "state of the layer-wise optimizer is not written in the format `torch`, where each data-parallel rank of "
            "the run that loads it needs its own part",
            hint="--to torch_dist writes it for any number of ranks; --no-optimizer leaves it behind",
        )
    if dims.num_experts:
        mp_rank_layout.check_expert_cut(layout)
    folder = path / name_of(request.iteration)
    reservation = Reservation(path)
    present = [weight for weight in request.family.weights if weight.mcore is not None and weight.exists(dims)]
    rows = in_module_order(present, spec.implementation, request.release)
    apart = bool(dims.num_experts) and layout.ep > 1
    model = _Model(
        rows,
        dims,
        dtype_of,
        layout,
        spec.implementation,
        spec.experts,
        request.norm_state,
        request.release,
        common,
        request.random_states,
        training,
        None if training is None else groups_of(training, rows, apart=apart),
    )
    laid_out: dict[Rank, _LaidOut] = {}
    files = {rank: _reserve_rank(folder, rank, model, laid_out, reservation) for rank in layout.ranks()}
    reservation.texts = {path / TRACKER: tracker_bytes(request.iteration)}
    stages = layout.stages(dims.num_layers)
    reserved = MpRankCheckpoint(
        folder, files, common["args"], layout, stages, spec.implementation, spec.experts, release=request.release
    )
    return reserved, reservation


class _LaidOut(NamedTuple):
    """The file of all ranks of one kind: its planned chunks, its layout, and the keys of its models."""

    planned: RankFile
    layout: TreeLayout
    models: tuple[str, ...]


def _reserve_rank(
    folder: Path, rank: Rank, model: _Model, laid_out: dict[Rank, _LaidOut], reservation: Reservation
) -> RankFile:
    """Reserve the files of one rank; `laid_out` caches the layout of each kind of rank."""
    name = mp_rank_layout.rank_name(rank, model.layout)
    path = folder / name / MODEL_FILE
    kind = model.kind_of(rank)
    if kind not in laid_out:
        laid_out[kind] = model.lay_out(name, path, rank)
    planned, layout, models = laid_out[kind]
    buffers = None
    if model.training is not None and model.training.distributed and model.chained is not None:
        first = next(each for each in model.layout.ranks() if (each.tp, each.pp) == (rank.tp, rank.pp))
        content = buffers_of(planned, rank, model.chained, model.common["args"], saves_dense=rank == first)
        buffers = reserve_tree(path.with_name(DISTRIBUTED_FILE), content, reservation)
    tree = layout.reserve(path, reservation)
    chunks = tuple(_chunk(tree.pop(key)) for key in models)
    return RankFile(name, path, tree, chunks, buffers)


def _planned(path: Path, state: State, moments: Mapping[str, tuple[str, ...]]) -> Chunk:
    """Return a chunk before it is laid out: its tensors' shapes and dtypes are final, their offsets are not."""
    held = {key: hole for key, hole in state.items() if hole is not None and hole.content is None}
    return {
        name_of_weight(key): LocalTensor(key, View.of(path, 0, hole.meta), moments=moments[key])
        for key, hole in held.items()
    }


def _chunk(views: Mapping[str, View | None]) -> Chunk:
    return {
        name_of_weight(key): LocalTensor(key, view)
        for key, view in views.items()
        if view is not None and not key.endswith("_extra_state")
    }
