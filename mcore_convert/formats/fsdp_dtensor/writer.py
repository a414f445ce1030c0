"""Reserving an `fsdp_dtensor` directory with the keys that Megatron-FSDP's `load_checkpoint` requests from torch's DCP.

A requested key that the directory lacks is silently not loaded (Megatron-LM 0.14 to 0.19, `checkpointing.py`:
`allow_partial_load`), so every name has to be the one of the run's modules.
"""

from __future__ import annotations

import argparse
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from mcore_convert.errors import LayoutError, MappingError
from mcore_convert.formats.base import Training
from mcore_convert.formats.files import dcp, torch_archive
from mcore_convert.formats.files.dcp_metadata import metadata_bytes
from mcore_convert.formats.files.dcp_writer import DcpFiles, archive_of, bounded
from mcore_convert.formats.format import Resume
from mcore_convert.formats.fsdp_dtensor.checkpoint import FSDP_DTENSOR, SCHEDULER, FsdpCheckpoint
from mcore_convert.formats.fsdp_dtensor.optimizer import GATE, STEP, UP
from mcore_convert.formats.megatron.modules import (
    MTP_LAYER,
    MTP_MODEL_LAYER,
    SEQUENTIAL,
    TRANSFORMER_ENGINE,
    is_down_projection,
    name_in_module,
)
from mcore_convert.formats.megatron.param_groups import WITHOUT, counts_steps, kind_of, kinds_of
from mcore_convert.formats.megatron.run_directory import TRACKER, name_of, tracker_bytes
from mcore_convert.formats.request import Request, Reservation
from mcore_convert.formats.traits import LayerSpec
from mcore_convert.spec.family import Item
from mcore_convert.spec.holding import is_of_expert
from mcore_convert.spec.layout import Rank
from mcore_convert.spec.names import ADAM, MASTER, PARAM, spell
from mcore_convert.spec.releases import MLA_UNFUSED_IN_FSDP, MTP_LAYER_IN_FSDP, Release
from mcore_convert.spec.releases import MTP_MODEL_LAYER as MTP_NAMES
from mcore_convert.spec.shard import Box, Shape
from mcore_convert.storage.views import Slot, TensorMeta, View

MODEL = "model.module."
# Prefixes of Megatron-FSDP's two wrappers, and of the wrapper that casts to 16 bits.
WRAPPERS, CASTING = "module.module.", "module."
# Bytes. A rank loads every chunk of which it needs rows completely, and may need one part in a few hundred of a tensor.
CHUNK = 2**26


def resume(training: Training, release: Release, args: Mapping[str, Any]) -> Resume:
    """Return the arguments with which Megatron-LM shards the optimizer, and notes on state that the format lacks."""
    strategy = args.get("data_parallel_sharding_strategy")
    sharded = strategy if strategy not in (None, "no_shard") else "optim_grads_params"
    notes = [f"optimizer state is written as `{FSDP_DTENSOR}`: Megatron-LM 0.14 and later load it with Megatron-FSDP"]
    if "grad_scaler" in training.rest:
        notes.append("the loss scale is left behind: Megatron-FSDP stores none")
    return Resume({"use_distributed_optimizer": True, "data_parallel_sharding_strategy": sharded}, tuple(notes))


@dataclass
class _Content:
    """Keys of the checkpoint that is laid out, with their paths in the nested state dict."""

    files: DcpFiles
    tensors: dict[str, TensorMeta] = field(default_factory=dict)
    chunks: dict[str, list[dcp.Chunk]] = field(default_factory=dict)
    slots: dict[str, list[Slot]] = field(default_factory=dict)
    objects: dict[str, dcp.Place] = field(default_factory=dict)
    paths: dict[str, tuple[str, ...]] = field(default_factory=dict)
    _archives: dict[object, torch_archive.Archive] = field(default_factory=dict)

    def add_tensor(self, path: tuple[str, ...], shape: Shape, dtype: str) -> None:
        """Lay out a tensor in chunks of rows."""
        key = self._named(path)
        self.tensors[key] = TensorMeta(shape, dtype)
        self.chunks[key], self.slots[key] = [], []
        for box in bounded(Box.whole(shape), dtype, CHUNK):
            meta = TensorMeta(box.sizes, dtype)
            archive = archive_of(meta)
            place = self.files.place(archive)
            self.chunks[key].append(dcp.Chunk(box, place))
            self.slots[key].append(Slot(View.of(self.files.path, place.offset + archive.holes[0], meta), box))

    def add_number(self, path: tuple[str, ...], value: float) -> None:
        """Lay out a filled tensor without dimensions."""
        key, meta = self._named(path), TensorMeta((), "float32")
        self.tensors[key] = meta
        archive = archive_of(meta).filled(struct.pack("<f", value))
        self.chunks[key] = [dcp.Chunk(Box((), ()), self.files.place(archive))]

    def add_object(self, path: tuple[str, ...], value: Any, known_as: object = None) -> None:
        """Lay out an object; `known_as` is the cache key of an object that many keys share."""
        archive = None if known_as is None else self._archives.get(known_as)
        if archive is None:
            archive = torch_archive.lay_out(lambda refs: value, []).filled()
            if known_as is not None:
                self._archives[known_as] = archive
        self.objects[self._named(path)] = self.files.place(archive)

    def _named(self, path: tuple[str, ...]) -> str:
        key = ".".join(path)
        self.paths[key] = path
        return key


@dataclass(frozen=True)
class _Writer:
    """Names and groups of parameters for a request."""

    request: Request
    spec: LayerSpec

    def names_of(self, item: Item) -> list[str]:
        """Return the names of a weight: one, or two for gate and up."""
        name = self.name_in_run(item)
        if self.request.release >= MTP_LAYER_IN_FSDP:
            name = name.replace(MTP_MODEL_LAYER, MTP_LAYER)
        return [f"{name}{GATE}", f"{name}{UP}"] if item.weight.shard.is_gated and self.splits else [name]

    def name_in_run(self, item: Item) -> str:
        """Return the name of a weight in the run's modules, which the fields of its parameter group have."""
        name = spell(name_in_module(item.weight.mcore or "", self.spec.implementation, self.spec.experts), item.at)
        return name.replace(MTP_LAYER, MTP_MODEL_LAYER) if self.request.release >= MTP_NAMES else name

    @property
    def splits(self) -> bool:
        """Whether gate and up are separate tensors; without `--swiglu` a run keeps them in one."""
        return bool(self.request.common["args"].get("swiglu"))

    def refuse_interleaved(self) -> None:
        """Refuse gate and up in one tensor that is interleaved by rank.

        Raises:
            LayoutError: they are sharded over ranks.
        """
        gated = {item.weight for item in self.request.dtype_of if item.weight.shard.is_gated}
        cuts = [self.request.layout.cut_at(Rank(), is_expert=is_of_expert(weight))[0] for weight in gated]
        if not self.splits and max(cuts, default=1) > 1:
            raise LayoutError(
                f"`{FSDP_DTENSOR}` has gate and up rank by rank where the activation is not SwiGLU "
                "(`handle_swiglu_in_state_dict`)",
                hint="leave out --tp, or cut no expert: --etp 1",
            )

    def add(self, item: Item, dtype: str, content: _Content) -> None:
        """Lay out one state of a weight; the weight itself is stored as its master copy."""
        if item.state == PARAM and item._replace(state=MASTER) in self.request.dtype_of:
            return
        names, dims = self.names_of(item), self.request.dims
        shape = dims.padded_shape(item.weight.shape, vocab=item.weight.vocab)
        part = (shape[0] // len(names), *shape[1:])
        for name in names:
            if item.state in (PARAM, MASTER):
                content.add_tensor(("model", f"module.{name}"), part, dtype)
            else:
                content.add_tensor(("optimizer", "state", f"{self.wrapped}{name}", item.state), part, dtype)

    def add_group(self, item: Item, training: Training, content: _Content) -> None:
        """Lay out the fields of a parameter's group.

        Transformer Engine's Adam counts steps per group, and torch's per parameter: a run requests one of them, and
        would restart from the first step without it.
        """
        weight = item.weight
        number, group = self._group_of(item, training)
        is_expert = is_of_expert(weight)
        values = {**group, "is_expert_parallel": is_expert and self.request.layout.ep > 1}
        for name in self.names_of(item):
            content.add_number(("optimizer", "state", f"{self.wrapped}{name}", STEP), group[STEP])
        for name, value in values.items():
            path = ("optimizer", "param_to_group_meta", f"{self.wrapped}{self.name_in_run(item)}", name)
            content.add_object(path, value, (number, is_expert, name))

    def _group_of(self, item: Item, training: Training) -> tuple[int, Mapping[str, Any]]:
        weight, args = item.weight, self.request.common["args"]
        own = [g for g in training.groups if bool(g.get("is_expert_parallel")) == is_of_expert(weight)]
        groups = own or training.groups
        kind = kind_of(weight.mcore or "", len(weight.shape), args)
        kinds = kinds_of(groups, args) if len(groups) > 1 else [kind]
        if kind not in kinds:
            raise MappingError(
                f"the optimizer has {len(groups)} groups, none of which is that of `{weight.name}`", hint=WITHOUT
            )
        group = groups[kinds.index(kind)]
        return training.groups.index(group), group

    @cached_property
    def wrapped(self) -> str:
        """Prefix of parameter names in the optimizer's keys."""
        args = self.request.common["args"]
        return f"{WRAPPERS}{CASTING}" if args.get("bf16") or args.get("fp16") else WRAPPERS


def reserve(request: Request) -> tuple[FsdpCheckpoint, Reservation]:
    """Lay out a checkpoint directory with its tracker file. Any number of data-parallel and tensor ranks can load it.

    Raises:
        LayoutError: there are several pipeline stages, whose layers have the same names, or fused projections.
        MappingError: the optimizer has no group for a parameter, or is not Adam; or a weight has segments.
    """
    path, training = request.path, request.training
    if request.layout.pp > 1:
        raise LayoutError(
            f"`{FSDP_DTENSOR}` has no pipeline stages: Megatron-LM gives the layers of each the same names there",
            hint="leave out --pp",
        )
    others = {item.state for item in request.dtype_of} - {PARAM, MASTER, *ADAM}
    if others or (training is not None and not all(map(counts_steps, training.groups))):
        raise MappingError(
            f"`{FSDP_DTENSOR}` holds Adam's state alone: Megatron-FSDP splits no other (`handle_swiglu_in_state_dict`)",
            hint=WITHOUT,
        )
    weights = {item.weight: None for item in request.dtype_of}
    segmented = [weight.name for weight in weights if weight.shard.names]
    if segmented:
        raise MappingError(
            f"`{FSDP_DTENSOR}` does not hold linear attention: Megatron-LM up to 0.19 does not split its segments",
            items=segmented,
            hint="--to torch_dist or --to torch",
        )
    is_fused = request.common["args"].get("mla_down_proj_fusion") and any(map(is_down_projection, weights))
    if is_fused and (training is not None or request.release < MLA_UNFUSED_IN_FSDP):
        raise LayoutError(
            f"`{FSDP_DTENSOR}` does not name the down-projections of latent attention for a run that fuses them",
            items=["`mla_down_proj_fusion` = True: Megatron-FSDP up to 0.19 saves them as one, and later their groups"],
            hint="--arg mla_down_proj_fusion=False, and load it without --mla-down-proj-fusion",
        )
    folder = path / name_of(request.iteration)
    reservation = Reservation(path)
    content = _Content(DcpFiles(folder, reservation, request.options.max_shard_size))
    spec = request.layer_spec or LayerSpec(TRANSFORMER_ENGINE, SEQUENTIAL)
    writer = _Writer(request, spec)
    writer.refuse_interleaved()
    for item, dtype in request.dtype_of.items():
        if item.weight.mcore is not None:
            writer.add(item, dtype, content)
            if training is not None and item.state == PARAM and item.weight.trained:
                writer.add_group(item, training, content)
    for name, value in _objects(request):
        content.add_object(name, value)
    reservation.texts = {
        **({} if request.run_config is None else {folder / "run_config.yaml": request.run_config.encode()}),
        folder / dcp.METADATA: metadata_bytes(content.tensors, content.chunks, content.objects, paths=content.paths),
        path / TRACKER: tracker_bytes(request.iteration),
    }
    directory = dcp.Directory(folder, content.tensors, content.chunks, content.objects)
    return FsdpCheckpoint(folder, directory, MODEL, spec, reserved=content.slots), reservation


def _objects(request: Request) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the path and the value of each object."""
    common, training = request.common, request.training
    rest = {} if training is None else {key: each for key, each in training.rest.items() if key != "grad_scaler"}
    for key, value in {**rest, **common, "args": argparse.Namespace(**common["args"])}.items():
        yield (key,), value
    for key, value in ((training and training.scheduler) or {}).items():
        yield (SCHEDULER.removesuffix("."), key), value
