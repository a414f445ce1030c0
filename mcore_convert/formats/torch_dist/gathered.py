"""The form `dp_zero_gather_scatter` of the distributed optimizer's state, of Megatron Core 0.5 to 0.19.

Each data-parallel group has an object with one flat tensor per buffer and state, as in `distrib_optim.pt`
(`distrib_optimizer.py`, `sharded_param_state_dp_zero`). They are read as buckets, one per buffer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mcore_convert.errors import UnreadableCheckpoint
from mcore_convert.formats.files import dcp
from mcore_convert.formats.megatron.module_buffers import Place
from mcore_convert.spec.config.arguments import TorchDtype
from mcore_convert.spec.shard import Box
from mcore_convert.storage.views import TensorMeta, View

STATE = "param_state"
NOWHERE = dcp.Place("", 0, 0)


@dataclass(frozen=True)
class Gathered(dcp.Directory):
    """The flat tensors under keys of buckets, each with one chunk."""

    views: Mapping[str, View] = field(default_factory=dict)

    def view(self, key: str, chunk: dcp.Chunk) -> View:
        """Return the view of a key."""
        return self.views[key]


def as_buckets(
    directory: dcp.Directory, objects: Mapping[tuple[int, int], str]
) -> tuple[Gathered, dict[Place, dict[str, str]]]:
    """Return the tensors of these objects, and the keys of each bucket.

    Args:
        objects: the keys on disk, by the numbers of the optimizer in the chain and of the data-parallel group.

    Raises:
        UnreadableCheckpoint: an object does not have one tensor per state.
    """
    views: dict[str, View] = {}
    keys: dict[Place, dict[str, str]] = {}
    for (chain, group), on_disk in objects.items():
        for buffer, dtype, kind, view in _tensors(directory, on_disk):
            key = (
                f"chained_{chain}.optimizer.distributed.dp_group_idx_{group}.gbuf_idx_{buffer}"
                f".dtype_({dtype}, ).bucket_idx_0.{kind}"
            )
            views[key] = view
            keys.setdefault((chain, group, buffer, 0), {})[kind] = key
    metas = {key: TensorMeta(view.shape, view.dtype) for key, view in views.items()}
    chunks = {key: [dcp.Chunk(Box.whole(view.shape), NOWHERE)] for key, view in views.items()}
    return Gathered(directory.path, metas, chunks, {}, views=views), keys


def _tensors(directory: dcp.Directory, on_disk: str) -> Iterator[tuple[int, str, str, View]]:
    """Yield the tensors of one object: number and dtype of the buffer, state, and view."""
    content: Any = directory.object(on_disk)
    if isinstance(content, list) and len(content) == 1:  # a sharded object is saved as a list of one
        (content,) = content
    buffers = content if isinstance(content, dict) and content.get("buckets_coalesced") else {}
    has_tensors = False
    for buffer, by_dtype in buffers.items():
        for dtypes, tensors in by_dtype.items() if isinstance(buffer, int) and isinstance(by_dtype, dict) else ():
            of_parameters = dtypes[0] if isinstance(dtypes, tuple) and dtypes else None
            if not isinstance(of_parameters, TorchDtype) or not isinstance(tensors, dict):
                continue
            for kind, view in tensors.items():
                if isinstance(view, View) and len(view.shape) == 1:
                    has_tensors = True
                    yield buffer, of_parameters.name, kind, view
    if not has_tensors:
        raise UnreadableCheckpoint(
            f"`{on_disk}` in `{directory.path}` is not of one tensor for each state, as Megatron-LM writes it since "
            "February 2024",
            hint="leave the optimizer state behind with --no-optimizer",
        )
