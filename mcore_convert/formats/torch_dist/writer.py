"""Reserving a `torch_dist` directory that every Megatron-LM since 0.11 loads with default strictness and no flags.

It has stacked keys, or keys per layer if layers differ; one chunk per layer, cut for the chosen TP; the `_extra_state`
objects that any model requires; the common state in both places where versions expect it.
"""

from __future__ import annotations

import argparse
import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from mcore_convert.errors import MappingError, fold
from mcore_convert.formats.base import Training
from mcore_convert.formats.files import dcp
from mcore_convert.formats.files import torch_archive as torch_file
from mcore_convert.formats.files.dcp_metadata import metadata_bytes
from mcore_convert.formats.files.dcp_writer import DcpFiles, archive_of, bounded
from mcore_convert.formats.megatron.modules import (
    DENSE_NORM,
    EXPERT_NORM,
    EXTRA_STATE,
    FUSED_NORMS,
    LOCAL,
    shard_of,
)
from mcore_convert.formats.megatron.run_directory import TRACKER, name_of, tracker_bytes
from mcore_convert.formats.request import Request, Reservation
from mcore_convert.formats.torch_dist.checkpoint import NO_WEIGHT, TorchDistCheckpoint
from mcore_convert.formats.torch_dist.common_state import COMMON, COMMON_STATE, random_archives
from mcore_convert.formats.torch_dist.extra_states import axes_written, extra_state_keys, sizes_of
from mcore_convert.formats.torch_dist.form import Form
from mcore_convert.formats.torch_dist.keys import SlotsByPlace, keyed_parts
from mcore_convert.formats.torch_dist.training import common_of
from mcore_convert.spec.dims import Dims
from mcore_convert.spec.family import Item, Weight
from mcore_convert.spec.names import drop, spell
from mcore_convert.spec.shard import COLUMN, Box, Shape, Shard
from mcore_convert.storage.views import Slot, TensorMeta, View

METADATA_JSON = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


class _Chunk(NamedTuple):
    """A box of the tensor of one layer and expert, stored as a chunk: `sizes` are those in the key's tensor, and
    `kind` the fields of its view except the place.
    """

    box: Box
    sizes: Shape
    archive: torch_file.Archive
    kind: tuple[Any, ...]


class _Part(NamedTuple):
    """The chunks that each layer and expert adds to a key with the suffix `end`.

    `shape` is that of the key's tensor, `cell` that of one tensor-parallel rank's part of one layer.
    """

    end: str
    shape: Shape
    cell: Shape
    chunks: list[_Chunk]


@dataclass
class _Content:
    """The keys of the checkpoint that is laid out, and the dtypes of each name, with the first item of each dtype."""

    tensors: dict[str, TensorMeta] = field(default_factory=dict)
    chunks: dict[str, list[dcp.Chunk]] = field(default_factory=dict)
    slots: dict[str, SlotsByPlace] = field(default_factory=dict)
    dtypes: dict[str, dict[str, Item]] = field(default_factory=dict)
    cells: dict[str, Shape] = field(default_factory=dict)  # one tensor-parallel rank's part of one layer
    objects: dict[str, dcp.Place] = field(default_factory=dict)
    laid: dict[Any, tuple[tuple[str, ...], str, list[_Part]]] = field(default_factory=dict)  # by common properties


def reserve(request: Request) -> tuple[TorchDistCheckpoint, Reservation]:
    """Lay out a checkpoint directory with its tracker file.

    The layout determines the number of chunks of a layer's tensor; any tensor-parallel size can load them. A `release`
    needs no flags to load.
    """
    path, dims, dtype_of, tp = request.path, request.dims, request.dtype_of, request.layout.tp
    common, training = request.common, request.training
    folder = path / name_of(request.iteration)
    reservation = Reservation(path)
    files = DcpFiles(folder, reservation, request.options.max_shard_size)
    content = _Content()
    form = Form.of(training, common["args"], request.release, dtype_of.keys())
    for item, dtype in dtype_of.items():
        if item.weight.mcore is not None:
            cut = tp if item.at.expert is None else request.layout.expert_tp
            shard = item.weight.shard
            if form.is_flat:  # its cells are the ranks' parts
                shard = shard_of(item.weight, common["args"].get("transformer_impl") or "", request.release)
            _reserve_weight(item, shard, form, dtype, dims, cut, files, content)
    _refuse_mixed(content)
    blob = torch_file.lay_out(list, [TensorMeta((len(EXTRA_STATE),), "uint8")]).filled(EXTRA_STATE)
    content.objects |= {key: files.place(blob) for key in extra_state_keys(dtype_of, dims)}
    content.objects |= {key: files.place(archive) for key, archive in random_archives(request.random_states)}
    content.objects[COMMON_STATE] = files.place(_common_state(common, training, dtype_of, form, listed=True))
    reservation.texts = {
        folder / COMMON: _common_state(common, training, dtype_of, form, listed=False).literals[0][1],
        **({} if request.run_config is None else {folder / "run_config.yaml": request.run_config.encode()}),
        folder / "metadata.json": json.dumps(METADATA_JSON).encode(),
        folder / dcp.METADATA: _metadata(content, common["args"], form),
        path / TRACKER: tracker_bytes(request.iteration),
    }
    directory = dcp.Directory(folder, content.tensors, content.chunks, content.objects)
    keys = {key: key for key in content.tensors if not NO_WEIGHT.match(key)}
    return TorchDistCheckpoint(folder, directory, keys, "", content.slots), reservation


def _metadata(content: _Content, args: Mapping[str, Any], form: Form) -> bytes:
    """Return `.metadata`, with norms under the names that the run's layer spec requires.

    Megatron's local spec maps the norm of layers with experts to the name in dense layers; with latent attention it
    maps nothing, and norms have the names of their modules (`gpt_layer_specs.py`, `sharded_state_dict_keys_map`).
    """
    names: Mapping[str, str] = {}
    if args.get("transformer_impl") == LOCAL:
        names = FUSED_NORMS if args.get("multi_latent_attention") else {EXPERT_NORM: DENSE_NORM}

    def on_disk(key: str) -> str:
        return next((key.replace(ours, theirs) for ours, theirs in names.items() if ours in key), key)

    tensors = {on_disk(key): meta for key, meta in content.tensors.items()}
    chunks = {on_disk(key): parts for key, parts in content.chunks.items()}
    unflattened = {on_disk(key): content.tensors[key].shape for key in content.tensors if form.flattens(key)}
    for key in filter(form.flattens, content.tensors):
        tensors[on_disk(key)], chunks[on_disk(key)] = _flattened(
            content.tensors[key], content.cells[key], content.chunks[key]
        )
    return metadata_bytes(tensors, chunks, content.objects, unflattened)


def _flattened(meta: TensorMeta, cell: Shape, chunks: list[dcp.Chunk]) -> tuple[TensorMeta, list[dcp.Chunk]]:
    """Return a key and its chunks in the shape `(*grid, elements of a cell)` (Megatron Core 0.12,
    `strategies/resharding.py`).

    Each cell of the grid is flattened separately, so a chunk of some of its rows is a range of it. Cells are as small
    as Megatron's: it fails if one rank reads two parts of a cell (`strategies/torch.py`,
    `sharded_tensor_to_torch_sharded_tensor`).
    """
    ones = (1,) * len(cell)
    flat = []
    for box, place in chunks:
        at = tuple(offset // size for offset, size in zip(box.offsets, cell, strict=True))
        inside = (offset % size for offset, size in zip(box.offsets, cell, strict=True))
        start = sum(offset * math.prod(cell[axis + 1 :]) for axis, offset in enumerate(inside))
        flat.append(dcp.Chunk(Box((*at, start), (*ones, math.prod(box.sizes))), place))
    grid = tuple(size // part for size, part in zip(meta.shape, cell, strict=True))
    return TensorMeta((*grid, math.prod(cell)), meta.dtype), flat


def _common_state(
    common: Mapping[str, Any], training: Training | None, dtype_of: Mapping[Item, str], form: Form, *, listed: bool
) -> torch_file.Archive:
    """Return the complete archive of the common state: plain, or `listed` as objects are saved."""
    state = {**common, "args": argparse.Namespace(**common["args"])}

    def tree(refs: list[Any]) -> Any:
        scale = refs[0] if refs else None
        beside = {} if training is None else common_of(training, common["args"], dtype_of, form.name, scale=scale)
        whole = {**beside, **state}
        return [whole] if listed else whole

    scaler = None if training is None else training.rest.get("grad_scaler")
    if scaler is None:
        return torch_file.lay_out(tree, []).filled()
    return torch_file.lay_out(tree, [TensorMeta((1,), "float32")]).filled(struct.pack("<f", scaler["scale"]))


def _reserve_weight(
    item: Item, shard: Shard, form: Form, dtype: str, dims: Dims, tp: int, files: DcpFiles, content: _Content
) -> None:
    """Add the chunks of one layer's state of a weight to its key."""
    weight, at, state = item
    assert weight.mcore is not None
    prefix, alike = form.prefix(item), (weight, state, shard, dtype, tp)
    laid = content.laid.get(alike)
    if laid is None:
        laid = content.laid[alike] = _laid(weight, dims.sized(shard), prefix, form, dtype, dims, tp)
    axes, template, parts = laid
    place, name = tuple([getattr(at, axis) for axis in axes]), prefix + spell(template, at)
    content.dtypes.setdefault(name, {}).setdefault(dtype, item)
    for part in parts:
        key = name + part.end
        if key not in content.tensors:
            content.tensors[key], content.cells[key] = TensorMeta(part.shape, dtype), part.cell
            content.chunks[key], content.slots[key] = [], {}
        chunks, slots = content.chunks[key], content.slots[key].setdefault(place, [])
        for box, sizes, archive, kind in part.chunks:
            where = files.place(archive)
            chunks.append(dcp.Chunk(Box(place + box.offsets, sizes), where))
            slots.append(Slot(View(files.path, where.offset + archive.holes[0], *kind), box))


def _laid(
    weight: Weight, shard: Shard, prefix: str, form: Form, dtype: str, dims: Dims, tp: int
) -> tuple[tuple[str, ...], str, list[_Part]]:
    """Return the common properties of a weight's keys in all layers and experts: leading axes, template and parts."""
    assert weight.mcore is not None
    axes = axes_written(weight.mcore, dims)
    lead, ones = sizes_of(axes, dims), (1,) * len(axes)
    template = drop(weight.mcore, *axes)
    whole = dims.padded_shape(weight.shape, vocab=weight.vocab)
    parts = []
    for end, _, shape in keyed_parts("", whole, shard):
        cells = (COLUMN if shard.names else shard).grid(shape, tp)
        flat = form.flattens(f"{prefix}{template}{end}")
        chunks = []
        for box in (box for cell in cells for box in bounded(cell, dtype)):
            sizes = (*ones, *box.sizes)
            archive = archive_of(TensorMeta((*(1 for _ in sizes), box.numel) if flat else sizes, dtype))
            chunks.append(_Chunk(box, sizes, archive, View.of(Path(), 0, TensorMeta(box.sizes, dtype))[2:]))
        parts.append(_Part(end, (*lead, *shape), (*ones, *cells[0].sizes), chunks))
    return axes, template, parts


def _refuse_mixed(content: _Content) -> None:
    """Refuse keys of several dtypes: a key has one dtype for all its layers and experts."""
    several = (dtypes for dtypes in content.dtypes.values() if len(dtypes) > 1)
    mixed = [f"{item} is {dtype}" for dtypes in several for dtype, item in dtypes.items()]
    if mixed:
        raise MappingError(
            "a weight has another dtype in other layers, which `torch_dist` cannot hold", items=fold(mixed)
        )
