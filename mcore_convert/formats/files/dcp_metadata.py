"""Writing `.metadata` of a `torch.distributed.checkpoint` directory, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from mcore_convert.formats.files import pickle_writer
from mcore_convert.formats.files.dcp import SIZE, STORAGE_INFO, Chunk, Place
from mcore_convert.formats.files.pickle_writer import HOLE, Call, Global, Hole, Instance, Rows
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

    `unflattened` is that of Directory, for Megatron Core 0.8 to 0.15. `paths` has the path of each key in the nested
    state dict that torch's own planner builds (`default_planner.py`, `DefaultSavePlanner`).
    """
    entries: dict[str, Any] = {}
    for key, meta in tensors.items():
        layout = Call(Global("torch.serialization", "_get_layout"), ("torch.strided",))
        memory_format = Call(_dcp("_MEM_FORMAT_ENCODING"), (0,))
        properties = (TorchDtype(meta.dtype), layout, False, memory_format, False)
        boxes = Rows(((BOX, (chunk.box for chunk in chunks[key])),))
        entries[key] = Instance(
            _dcp("TensorStorageMetadata"),
            {"properties": Instance(_dcp("TensorProperties"), properties), "size": _size(meta.shape), "chunks": boxes},
        )
    for key in objects:
        entries[key] = Instance(_dcp("BytesStorageMetadata"), None)
    of_chunks = ((key, chunk.box.offsets, *chunk.place) for key in tensors for chunk in chunks[key])
    of_objects = ((key, *place) for key, place in objects.items())
    storage = Rows((((_index(HOLE_SIZE), PLACE), of_chunks), ((_index(None), PLACE), of_objects)), is_dict=True)
    planned = None if paths is None else dict(paths)
    state = {"state_dict_metadata": entries, "planner_data": planned, "storage_data": storage, "storage_meta": None}
    shapes = {key: {"nd_reformulated_orig_global_shape": shape} for key, shape in unflattened.items()}
    flattened = {"mcore_data": shapes} if shapes else {}
    return pickle_writer.dumps(Instance(_dcp("Metadata"), {**state, "version": None, **flattened}))


def _index(offset: Call | None) -> Instance:
    return Instance(_dcp("MetadataIndex"), {"fqn": HOLE, "offset": offset, "index": None})


def _size(shape: Shape | Hole) -> Call:
    return Call(SIZE, (shape,))


@lru_cache
def _dcp(name: str) -> Global:
    """Return a class of torch's metadata; always the same object, so that its name is pickled once."""
    return Global("torch.distributed.checkpoint.metadata", name)


HOLE_SIZE = _size(HOLE)
BOX = Instance(_dcp("ChunkStorageMetadata"), {"offsets": HOLE_SIZE, "sizes": HOLE_SIZE})
PLACE = Instance(STORAGE_INFO, {"relative_path": HOLE, "offset": HOLE, "length": HOLE})
