"""Reserving a `torch_dist` directory that every Megatron-LM from 0.11 on loads with default strictness and no flags.

Stacked keys, or keys of each layer where layers are not alike; one chunk per layer, cut for the chosen TP; the
`_extra_state` objects that any model asks for; the common state in both places where the versions look for it.
"""

from __future__ import annotations

import argparse
import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from mcore_convert.errors import MappingError, fold
from mcore_convert.formats.base import Request, Reservation, Training
from mcore_convert.formats.files import torch_archive as torch_file
from mcore_convert.formats.format import Resume
from mcore_convert.formats.megatron.modules import DENSE_NORM, EXPERT_NORM, EXTRA_STATE, LOCAL
from mcore_convert.formats.megatron.run_directory import TRACKER, name_of, tracker_bytes
from mcore_convert.formats.torch_dist import dcp
from mcore_convert.formats.torch_dist.checkpoint import NO_WEIGHT, TorchDistCheckpoint
from mcore_convert.formats.torch_dist.common_state import COMMON, COMMON_STATE, random_archives
from mcore_convert.formats.torch_dist.keys import axes_of
from mcore_convert.formats.torch_dist.training import FULLY_RESHARDABLE, MODEL_SPACE, common_of
from mcore_convert.spec import releases
from mcore_convert.spec.dims import Dims
from mcore_convert.spec.family import Item
from mcore_convert.spec.names import MASTER, PARAM, drop, placeholders_of, spell
from mcore_convert.spec.releases import Release
from mcore_convert.spec.shard import Box, Shape, Shard
from mcore_convert.storage.views import DTYPE_SIZES, Slot, TensorMeta, View

# A reading rank loads every chunk that it needs a part of, whole: smaller chunks keep its memory low.
MAX_CHUNK = 2**30
MAX_FILE = 2**31  # several files of this size are read in parallel
ALIGNMENT = 64
STATE_PREFIX = "optimizer.state."

METADATA_JSON = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


@dataclass
class _Files:
    """The `.distcp` files as they fill up."""

    folder: Path
    reservation: Reservation
    number: int = 0
    end: int = 0
    path: Path = field(init=False)  # of the current file

    def __post_init__(self) -> None:
        self.path = self.folder / f"__{self.number}_0.distcp"

    def place(self, archive: torch_file.Archive) -> dcp.Place:
        """Append an archive to the current file, or to a new one."""
        start = -(-self.end // ALIGNMENT) * ALIGNMENT
        if start and start + archive.size > MAX_FILE:
            self.number, start = self.number + 1, 0
            self.path = self.folder / f"__{self.number}_0.distcp"
        self.end = self.reservation.sizes[self.path] = start + archive.size
        self.reservation.literals += [(self.path, start + at, content) for at, content in archive.literals]
        return dcp.Place(self.path.name, start, archive.size)


@dataclass
class _Content:
    """The keys of the checkpoint as they are laid out."""

    tensors: dict[str, TensorMeta] = field(default_factory=dict)
    chunks: dict[str, list[dcp.Chunk]] = field(default_factory=dict)
    slots: dict[str, list[Slot]] = field(default_factory=dict)
    cells: dict[str, Shape] = field(default_factory=dict)  # of what one tensor-parallel rank has of one layer
    objects: dict[str, dcp.Place] = field(default_factory=dict)


@dataclass(frozen=True)
class _Form:
    """How the optimizer's states are named and cut.

    `name` is what Megatron Core calls the form of a distributed optimizer. That of 0.8 to 0.14, MODEL_SPACE, names them
    as plain optimizers do, and flattens them. `chained`: keys begin with the number of the optimizer, as up to 0.13
    where experts have one of their own (`optimizer.py`, `ChainedOptimizer`).
    """

    distributed: bool
    name: str
    chained: bool

    @classmethod
    def of(cls, training: Training | None, args: Mapping[str, Any], release: Release) -> _Form:
        distributed = training is not None and training.distributed
        apart = bool(args.get("num_experts")) and (args.get("expert_model_parallel_size") or 1) > 1
        name = FULLY_RESHARDABLE if release >= releases.FULLY_RESHARDABLE else MODEL_SPACE
        return cls(distributed, name, apart and release < releases.CHAINS_WITHOUT_PREFIX)

    @property
    def is_flat(self) -> bool:
        """Whether states are stored flattened."""
        return self.distributed and self.name == MODEL_SPACE

    def flattens(self, key: str) -> bool:
        """Whether this key is stored flattened."""
        return self.is_flat and NO_WEIGHT.match(key) is not None

    def prefix(self, item: Item) -> str:
        """What stands before a weight's key in the key of one of its states."""
        if item.state == PARAM:
            return ""
        masters = "param" if self.distributed and not self.is_flat else "fp32_param"
        number = int("expert" in placeholders_of(item.weight.mcore or ""))
        chain = f"chained_{number}." if self.chained else ""
        return f"{chain}{STATE_PREFIX}{masters if item.state == MASTER else item.state}."


def resume(training: Training, release: Release, args: Mapping[str, Any]) -> Resume:
    """Return what Megatron-LM must be told of a distributed optimizer's state, and which versions load it."""
    if not training.distributed:
        return Resume()
    since = releases.spelled(releases.FULLY_RESHARDABLE)
    if release >= releases.FULLY_RESHARDABLE:
        named = {"dist_ckpt_optim_fully_reshardable": True}
        form, which = FULLY_RESHARDABLE, f"Megatron-LM {since} and later load it, --for-megatron 0.14 is for older ones"
    else:
        named = {"ckpt_fully_parallel_save": True}  # 0.12 takes from it whether state is named by its parameters
        form, which = MODEL_SPACE, f"Megatron-LM up to {since} loads it, --for-megatron {since} is for newer ones"
    return Resume(named, (f"optimizer state is written as `{form}`: {which}",))


def reserve(request: Request) -> tuple[TorchDistCheckpoint, Reservation]:
    """Lay out a checkpoint directory with its tracker file.

    The layout says how many chunks a layer's tensor is cut into; any tensor parallelism can load them. A `release`
    needs no flags to load.
    """
    path, dims, dtype_of, tp = request.path, request.dims, request.dtype_of, request.layout.tp
    common, training = request.common, request.training
    folder = path / name_of(request.iteration)
    reservation = Reservation(path)
    files = _Files(folder, reservation)
    content = _Content()
    form = _Form.of(training, common["args"], request.release)
    for item, dtype in dtype_of.items():
        if item.weight.mcore is not None:
            cut = tp if item.at.expert is None else request.layout.expert_tp
            _reserve_weight(item, form, dtype, dims, cut, files, content)
    _refuse_mixed(dtype_of, dims)
    blob = torch_file.lay_out(list, [TensorMeta((len(EXTRA_STATE),), "uint8")]).filled(EXTRA_STATE)
    content.objects |= {key: files.place(blob) for key in _extra_state_keys(dtype_of, dims)}
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


def _metadata(content: _Content, args: Mapping[str, Any], form: _Form) -> bytes:
    """`.metadata`, with the norm of layers with experts under the name that the run's layer spec asks for.

    Megatron's own spec maps it to the name that dense layers use (`gpt_layer_specs.py`, `sharded_state_dict_keys_map`).
    """
    local = args.get("transformer_impl") == LOCAL and args.get("num_experts")

    def on_disk(key: str) -> str:
        return key.replace(EXPERT_NORM, DENSE_NORM) if local else key

    tensors = {on_disk(key): meta for key, meta in content.tensors.items()}
    chunks = {on_disk(key): parts for key, parts in content.chunks.items()}
    unflattened = {on_disk(key): content.tensors[key].shape for key in content.tensors if form.flattens(key)}
    for key in filter(form.flattens, content.tensors):
        tensors[on_disk(key)], chunks[on_disk(key)] = _flattened(
            content.tensors[key], content.cells[key], content.chunks[key]
        )
    return dcp.metadata_bytes(tensors, chunks, content.objects, unflattened)


def _flattened(meta: TensorMeta, cell: Shape, chunks: list[dcp.Chunk]) -> tuple[TensorMeta, list[dcp.Chunk]]:
    """A key and its chunks in the shape `(*grid, elements of a cell)` (Megatron Core 0.12, `strategies/resharding.py`).

    Each cell of the grid was flattened on its own, so that a chunk of some of its rows is a range of it. Cells are as
    small as those of Megatron: reading two parts of one cell on one rank fails there (`strategies/torch.py`,
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
    common: Mapping[str, Any], training: Training | None, dtype_of: Mapping[Item, str], form: _Form, *, listed: bool
) -> torch_file.Archive:
    """The archive of the common state, complete: as it stands, or `listed` as objects are saved."""
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


def _reserve_weight(item: Item, form: _Form, dtype: str, dims: Dims, tp: int, files: _Files, content: _Content) -> None:
    """Add the chunks of one state of one weight of one layer to its key."""
    weight, at, _ = item
    assert weight.mcore is not None
    axes = _axes(weight.mcore, dims)
    lead = _sizes(axes, dims)
    place = tuple(getattr(at, axis) for axis in axes)
    key = form.prefix(item) + spell(drop(weight.mcore, *axes), at)
    shape = dims.padded_shape(weight.shape, vocab=weight.vocab)
    content.tensors.setdefault(key, TensorMeta((*lead, *shape), dtype))
    chunks = content.chunks.setdefault(key, [])
    slots = content.slots.setdefault(key, [])
    cells, boxes = _cells(weight.shard, shape, tp, dtype)
    content.cells[key] = (*(1 for _ in axes), *cells[0].sizes)
    for box in boxes:
        chunk = Box((*place, *box.offsets), (*(1 for _ in axes), *box.sizes))
        meta = TensorMeta(chunk.sizes, dtype)
        stored = (*(1 for _ in meta.shape), meta.numel) if form.flattens(key) else meta.shape
        archive = _archive_of(TensorMeta(stored, dtype))
        where = files.place(archive)
        chunks.append(dcp.Chunk(chunk, where))
        slots.append(Slot(View.of(files.path, where.offset + archive.holes[0], meta), chunk))


@lru_cache(maxsize=4096)
def _archive_of(meta: TensorMeta) -> torch_file.Archive:
    """The archive of one tensor: chunks of one shape, as those of experts are, differ in their content alone."""
    return torch_file.lay_out(lambda refs: refs[0], [meta])


@lru_cache(maxsize=4096)
def _cells(shard: Shard, shape: Shape, tp: int, dtype: str) -> tuple[list[Box], list[Box]]:
    """What tensor-parallel ranks hold of a tensor, and the same in boxes that are small enough."""
    cells = shard.grid(shape, tp)
    return cells, [box for cell in cells for box in _bounded(cell, dtype)]


def _bounded(box: Box, dtype: str) -> list[Box]:
    """The box cut along its first dimension into boxes of at most MAX_CHUNK bytes."""
    row = box.numel // box.sizes[0] * DTYPE_SIZES[dtype]
    rows = max(1, MAX_CHUNK // row)
    return [
        Box((box.offsets[0] + at, *box.offsets[1:]), (min(rows, box.sizes[0] - at), *box.sizes[1:]))
        for at in range(0, box.sizes[0], rows)
    ]


def _axes(template: str, dims: Dims) -> tuple[str, ...]:
    """The placeholders of a name that are leading axes in what is written."""
    return axes_of(template, "stacked" if dims.stacked else "per_layer")


def _sizes(axes: tuple[str, ...], dims: Dims) -> Shape:
    leading = {"layer": dims.num_layers, "expert": dims.num_experts or 0}
    return tuple(leading[axis] for axis in axes)


def _refuse_mixed(dtype_of: Mapping[Item, str], dims: Dims) -> None:
    """A key has one dtype for all its layers and experts."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    for item, dtype in dtype_of.items():
        if item.weight.mcore is not None:
            key = spell(drop(item.weight.mcore, *_axes(item.weight.mcore, dims)), item.at)
            found.setdefault((key, item.state), {}).setdefault(dtype, str(item))
    mixed = [f"{name} is {dtype}" for dtypes in found.values() if len(dtypes) > 1 for dtype, name in dtypes.items()]
    if mixed:
        raise MappingError(
            "a weight has another dtype in other layers, which `torch_dist` cannot hold", items=fold(mixed)
        )


def _extra_state_keys(items: Iterable[Item], dims: Dims) -> Iterable[str]:
    """The `_extra_state` objects that some Megatron version or Transformer Engine asks for; others ignore them.

    Every linear layer and every norm that is a module of its own has one, and attention itself until 0.14.
    """
    keys: dict[str, None] = {}
    for weight, at, state in items:
        if weight.mcore is None or state != PARAM:
            continue
        module = weight.mcore.rpartition(".")[0]
        last = module.rpartition(".")[2]
        modules = [module] if last.startswith("linear_") or last.endswith("layernorm") else []
        if last == "linear_proj":
            modules.append(f"{module.rpartition('.')[0]}.core_attention")
        for each in modules:
            axes = _axes(each, dims)
            place = [getattr(at, axis) for axis in axes] or [0]
            shard = f"shard_{'.'.join(map(str, place))}_{'.'.join(map(str, _sizes(axes, dims) or (1,)))}"
            keys[f"{spell(drop(each, *axes), at)}._extra_state/{shard}"] = None
    return keys
