"""Writing `.metadata` of a `torch.distributed.checkpoint` directory, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from mcore_convert.formats.files import pickle_writer
from mcore_convert.formats.files.dcp import SIZE, STORAGE_INFO, Chunk, Place
from mcore_convert.formats.files.pickle_writer import Call, Global, Instance
from mcore_convert.spec.config.arguments import TorchDtype
from mcore_convert.spec.shard import Shape
from mcore_convert.storage.views import TensorMeta


def metadata_bytes(
    tensors: Mapping[str, TensorMeta],
    chunks: Mapping[str, list[Chunk]],
    objects: Mapping[str, Place],
    unflattened: Mapping[str, Shape] = MappingProxyType({}),
    paths: Mapping[str, tuple[str, ...]] | None = None,
) -> bytes:
    """Return the content of `.metadata`, as `torch.distributed.checkpoint` of torch 2.4 and later reads it.

    `unflattened` is as Directory has it, for Megatron Core 0.8 to 0.15. `paths` say where each key stood in the nested
    state dict that torch's own planner makes of them (`default_planner.py`, `DefaultSavePlanner`).
    """
    entries: dict[str, Any] = {}
    storage: dict[Any, Any] = {}
    for key, meta in tensors.items():
        boxes = [
            Instance(_dcp("ChunkStorageMetadata"), {"offsets": _size(c.box.offsets), "sizes": _size(c.box.sizes)})
            for c in chunks[key]
        ]
        layout = Call(Global("torch.serialization", "_get_layout"), ("torch.strided",))
        memory_format = Call(_dcp("_MEM_FORMAT_ENCODING"), (0,))
        properties = (TorchDtype(meta.dtype), layout, False, memory_format, False)
        entries[key] = Instance(
            _dcp("TensorStorageMetadata"),
            {"properties": Instance(_dcp("TensorProperties"), properties), "size": _size(meta.shape), "chunks": boxes},
        )
        for chunk in chunks[key]:
            storage[_index(key, _size(chunk.box.offsets))] = _info(chunk.place)
    for key, place in objects.items():
        entries[key] = Instance(_dcp("BytesStorageMetadata"), None)
        storage[_index(key, None)] = _info(place)
    planned = None if paths is None else dict(paths)
    state = {"state_dict_metadata": entries, "planner_data": planned, "storage_data": storage, "storage_meta": None}
    shapes = {key: {"nd_reformulated_orig_global_shape": shape} for key, shape in unflattened.items()}
    flattened = {"mcore_data": shapes} if shapes else {}
    return pickle_writer.dumps(Instance(_dcp("Metadata"), {**state, "version": None, **flattened}))


def _index(key: str, offset: Call | None) -> Instance:
    return Instance(_dcp("MetadataIndex"), {"fqn": key, "offset": offset, "index": None})


def _info(place: Place) -> Instance:
    state = {"relative_path": place.file, "offset": place.offset, "length": place.length}
    return Instance(STORAGE_INFO, state)


def _size(shape: Shape) -> Call:
    return Call(SIZE, (shape,))


@lru_cache
def _dcp(name: str) -> Global:
    """Return a class of torch's metadata; always the same object, so that its name is written once."""
    return Global("torch.distributed.checkpoint.metadata", name)
