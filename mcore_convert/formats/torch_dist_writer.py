"""Reserving a `torch_dist` directory that every Megatron-LM from 0.11 on loads with default strictness and no flags.

Stacked keys, or keys of each layer where layers are not alike; one chunk per layer, cut for the chosen TP; the
`_extra_state` objects that any model asks for; the common state in both places where the versions look for it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pickle
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from mcore_convert.errors import MappingError, fold
from mcore_convert.formats import dcp, torch_file
from mcore_convert.formats.base import Reservation, Training
from mcore_convert.formats.modules import LOCAL
from mcore_convert.formats.torch_dist import COMMON, COMMON_STATE, TRACKER, TorchDistCheckpoint
from mcore_convert.formats.torch_dist_keys import DENSE_NORM, EXPERT_NORM, axes_of
from mcore_convert.formats.torch_dist_training import common_of
from mcore_convert.spec.dims import Dims
from mcore_convert.spec.family import Item, Weight
from mcore_convert.spec.names import MASTER, PARAM, drop, spell
from mcore_convert.spec.shard import Box, Shape
from mcore_convert.tensors import DTYPE_SIZES, Slot, TensorMeta, View

# A reading rank loads every chunk that it needs a part of, whole: smaller chunks keep its memory low.
MAX_CHUNK = 2**30
MAX_FILE = 2**31  # several files of this size are read in parallel
ALIGNMENT = 64
STATE_PREFIX = "optimizer.state."

# What a module without FP8 state saves, in the one form that Transformer Engine 1.x to 2.x, Megatron's grouped linears
# and its local modules all accept: a byte tensor of pickle.dumps(None).
EXTRA_STATE = pickle.dumps(None, protocol=4)

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

    def place(self, archive: torch_file.Archive) -> dcp.Place:
        """Append an archive to the current file, or to a new one."""
        start = -(-self.end // ALIGNMENT) * ALIGNMENT
        if start and start + archive.size > MAX_FILE:
            self.number, start = self.number + 1, 0
        name = f"__{self.number}_0.distcp"
        path = self.folder / name
        self.end = self.reservation.sizes[path] = start + archive.size
        self.reservation.literals += [(path, start + at, content) for at, content in archive.literals]
        return dcp.Place(name, start, archive.size)


@dataclass
class _Content:
    """The keys of the checkpoint as they are laid out."""

    tensors: dict[str, TensorMeta] = field(default_factory=dict)
    chunks: dict[str, list[dcp.Chunk]] = field(default_factory=dict)
    slots: dict[str, list[Slot]] = field(default_factory=dict)
    objects: dict[str, dcp.Place] = field(default_factory=dict)


def reserve(
    path: Path,
    dims: Dims,
    dtype_of: Mapping[Item, str],
    *,
    tp: int,
    etp: int | None = None,
    iteration: int | None,
    common: Mapping[str, Any],
    run_config: str | None,
    training: Training | None = None,
) -> tuple[TorchDistCheckpoint, Reservation]:
    """Lay out a checkpoint directory with its tracker file.

    Args:
        path: the directory that `--load` will name.
        dtype_of: the dtype of every weight that the model has, and of its states where the optimizer goes along.
        tp: how many chunks a layer's tensor is cut into; any TP can load them.
        etp: the same for an expert's, where experts are cut apart from the rest.
        iteration: number of the `iter_*` directory; None for `release`, which needs no flags to load.
        common: the common state; its `args` are a dict.
        run_config: content of Megatron-Bridge's `run_config.yaml`; None for none.
        training: what stands beside the optimizer's states; there are none without it.
    """
    name = "release" if iteration is None else f"iter_{iteration:07d}"
    folder = path / name
    reservation = Reservation(path)
    files = _Files(folder, reservation)
    content = _Content()
    distributed = training is not None and training.distributed
    for item, dtype in dtype_of.items():
        if item.weight.mcore is not None:
            cut = tp if item.at.expert is None or etp is None else etp
            _reserve_weight(item, _prefix(item.state, distributed), dtype, dims, cut, files, content)
    _refuse_mixed(dtype_of, dims)
    blob = _filled(torch_file.lay_out(list, [TensorMeta((len(EXTRA_STATE),), "uint8")]), EXTRA_STATE)
    for key in _extra_state_keys(dtype_of, dims):
        content.objects[key] = files.place(blob)
    content.objects[COMMON_STATE] = files.place(_common_state(common, training, dtype_of, listed=True))
    reservation.texts = {
        folder / COMMON: _common_state(common, training, dtype_of, listed=False).literals[0][1],
        **({} if run_config is None else {folder / "run_config.yaml": run_config.encode()}),
        folder / "metadata.json": json.dumps(METADATA_JSON).encode(),
        folder / dcp.METADATA: _metadata(content, common["args"]),
        path / TRACKER: (name if iteration is None else str(iteration)).encode(),
    }
    directory = dcp.Directory(folder, content.tensors, content.chunks, content.objects)
    keys = {key: key for key in content.tensors if not key.startswith(STATE_PREFIX)}
    return TorchDistCheckpoint(folder, directory, keys, "", content.slots), reservation


def _metadata(content: _Content, args: Mapping[str, Any]) -> bytes:
    """`.metadata`, with the norm of layers with experts under the name that the run's layer spec asks for.

    Megatron's own spec maps it to the name that dense layers use (`gpt_layer_specs.py`, `sharded_state_dict_keys_map`).
    """
    local = args.get("transformer_impl") == LOCAL and args.get("num_experts")

    def on_disk(key: str) -> str:
        return key.replace(EXPERT_NORM, DENSE_NORM) if local else key

    tensors = {on_disk(key): meta for key, meta in content.tensors.items()}
    chunks = {on_disk(key): parts for key, parts in content.chunks.items()}
    return dcp.metadata_bytes(tensors, chunks, content.objects)


def _prefix(state: str, distributed: bool) -> str:
    """What stands before a weight's key in the key of one of its states."""
    if state == PARAM:
        return ""
    masters = "param" if distributed else "fp32_param"
    return f"{STATE_PREFIX}{masters if state == MASTER else state}."


def _common_state(
    common: Mapping[str, Any], training: Training | None, dtype_of: Mapping[Item, str], *, listed: bool
) -> torch_file.Archive:
    """The archive of the common state, complete: as it stands, or `listed` as objects are saved."""
    state = {**common, "args": argparse.Namespace(**common["args"])}

    def tree(refs: list[Any]) -> Any:
        whole = state
        if training is not None:
            beside = common_of(training, common["args"], dtype_of, scale=refs[0] if refs else None)
            whole = {**beside, **state}
        return [whole] if listed else whole

    scaler = None if training is None else training.rest.get("grad_scaler")
    if scaler is None:
        return _filled(torch_file.lay_out(tree, []))
    return _filled(torch_file.lay_out(tree, [TensorMeta((1,), "float32")]), struct.pack("<f", scaler["scale"]))


def _reserve_weight(item: Item, prefix: str, dtype: str, dims: Dims, tp: int, files: _Files, content: _Content) -> None:
    """Add the chunks of one state of one weight of one layer to its key."""
    weight, at, _ = item
    assert weight.mcore is not None
    axes = _axes(weight.mcore, dims)
    lead = _sizes(axes, dims)
    place = tuple(getattr(at, axis) for axis in axes)
    key = prefix + spell(drop(weight.mcore, *axes), at)
    shape = padded_shape(weight, dims)
    content.tensors.setdefault(key, TensorMeta((*lead, *shape), dtype))
    chunks = content.chunks.setdefault(key, [])
    slots = content.slots.setdefault(key, [])
    for box in itertools.chain.from_iterable(_bounded(b, dtype) for b in weight.shard.grid(shape, tp)):
        chunk = Box((*place, *box.offsets), (*(1 for _ in axes), *box.sizes))
        meta = TensorMeta(chunk.sizes, dtype)
        archive = _archive_of(meta)
        where = files.place(archive)
        chunks.append(dcp.Chunk(chunk, where))
        slots.append(Slot(View.of(files.folder / where.file, where.offset + archive.holes[0], meta), chunk))


@lru_cache(maxsize=4096)
def _archive_of(meta: TensorMeta) -> torch_file.Archive:
    """The archive of one tensor: chunks of one shape, as those of experts are, differ in their content alone."""
    return torch_file.lay_out(lambda refs: refs[0], [meta])


def padded_shape(weight: Weight, dims: Dims) -> Shape:
    """The shape of the global tensor as Megatron holds it, its vocabulary padded."""
    shape = dims.shape(weight.shape)
    return (dims.padded_vocab_size, *shape[1:]) if weight.vocab else shape


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


def _filled(archive: torch_file.Archive, *contents: bytes) -> torch_file.Archive:
    """An archive with what belongs into its holes: complete."""
    pieces = sorted([*archive.literals, *zip(archive.holes, contents, strict=True)])
    return torch_file.Archive(archive.size, ((0, b"".join(content for _, content in pieces)),), ())


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
