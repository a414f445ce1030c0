"""A format as another package would add it: one safetensors file with Megatron Core's names, arguments as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mcore_convert.formats.base import Checkpoint, Common, Findings, Side
from mcore_convert.formats.files import safetensors
from mcore_convert.formats.files.json_file import json_bytes, read_json
from mcore_convert.formats.format import Format
from mcore_convert.formats.request import Request, Reservation
from mcore_convert.formats.traits import Storage
from mcore_convert.spec.dims import Dims
from mcore_convert.spec.family import Item
from mcore_convert.spec.shard import Box
from mcore_convert.storage.views import Slot, TensorMeta, View

WEIGHTS, ARGUMENTS = "megatron.safetensors", "arguments.json"


@dataclass(frozen=True)
class TrialCheckpoint(Checkpoint):
    """An open or a reserved directory."""

    held: Mapping[str, View]
    args: Mapping[str, Any] = field(default_factory=dict)
    format: str = "trial"
    side: Side = Side.MEGATRON

    @property
    def tensors(self) -> Mapping[str, TensorMeta]:
        return {name: TensorMeta(view.shape, view.dtype) for name, view in self.held.items()}

    @property
    def common(self) -> Common:
        return Common(self.args)

    def storage(self) -> Storage:
        return Storage(num_files=1)

    def locate(self, item: Item, dims: Dims, findings: Findings) -> list[Slot]:
        if item.weight.mcore is None:
            return []
        name, shape = str(item), dims.shape(item.weight.shape)
        if not findings.expect(name, self.tensors.get(name), shape, rows_at_least=item.weight.vocab):
            return []
        return [Slot(self.held[name], Box.whole(self.held[name].shape))]


def open_trial(path: Path, args: Mapping[str, Any]) -> TrialCheckpoint:
    """Open a directory."""
    return TrialCheckpoint(path, safetensors.read(path / WEIGHTS), {**read_json(path / ARGUMENTS), **args})


def reserve(request: Request) -> tuple[TrialCheckpoint, Reservation]:
    """Lay out a directory."""
    metas = {
        str(item): TensorMeta(request.dims.padded_shape(item.weight.shape, vocab=item.weight.vocab), dtype)
        for item, dtype in request.dtype_of.items()
        if item.weight.mcore is not None
    }
    file, reservation = request.path / WEIGHTS, Reservation(request.path)
    head, starts = safetensors.header_bytes(metas)
    reservation.sizes[file] = len(head) + sum(meta.nbytes for meta in metas.values())
    reservation.literals.append((file, 0, head))
    plain = json.loads(json.dumps(request.common["args"], default=str))
    reservation.texts[request.path / ARGUMENTS] = json_bytes(plain)
    views = {name: View.of(file, starts[name], meta) for name, meta in metas.items()}
    return TrialCheckpoint(request.path, views, plain), reservation


def detect(path: Path) -> bool:
    """Return whether a directory is one of these."""
    return (path / WEIGHTS).is_file()


FORMAT = Format("trial", Side.MEGATRON, detect, open_trial, reserve, file_names=WEIGHTS)
