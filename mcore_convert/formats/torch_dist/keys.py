"""Keys of `torch_dist`: of the model's tensors, and of optimizer states with the same names.

A placeholder of a weight's name is either filled in or becomes a leading axis of the tensor. This is the only
difference between the three dialects (Megatron Core, `transformer_block.py`, `sharded_state_dict`):

    stacked     decoder.layers.mlp.linear_fc1.weight      [layers, ...], experts [layers, experts, ...]
    per_layer   decoder.layers.7.mlp.linear_fc1.weight    [...], experts [experts, ...]
    singleton   decoder.layers.7.mlp.linear_fc1.weight_w  gated parts under two keys, each expert under its own
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

from mcore_convert.formats.base import Findings
from mcore_convert.formats.files import dcp
from mcore_convert.formats.megatron.flat import Local, slots_of_flat
from mcore_convert.formats.megatron.modules import DENSE_NORM, EXPERT_NORM, FUSED_NORMS, LATENT
from mcore_convert.spec.dims import Dims
from mcore_convert.spec.family import Weight
from mcore_convert.spec.names import Index, drop, placeholders_of, spell
from mcore_convert.spec.shard import Box, Shape, Shard
from mcore_convert.storage.views import Slot, TensorMeta

ROUTER = "mlp.router.weight"

# Slots of a key by the indices of its leading axes, without these axes.
SlotsByPlace = dict[tuple[int, ...], list[Slot]]


@dataclass(frozen=True)
class StateKeys:
    """One state of all weights. `keys` maps the names of this module's dialects to the keys on disk.

    `label` is the prefix of names in messages. `reserved` has the slots of a reserved checkpoint.
    """

    directory: dcp.Directory
    keys: Mapping[str, str]
    label: str = ""
    reserved: Mapping[str, SlotsByPlace] | None = None

    @cached_property
    def tensors(self) -> Mapping[str, TensorMeta]:
        """Shape and dtype by name; flattened tensors have their original shape."""
        tensors = {}
        for key, on_disk in self.keys.items():
            meta = self.directory.tensors[on_disk]
            tensors[key] = TensorMeta(self.directory.unflattened.get(on_disk, meta.shape), meta.dtype)
        return tensors

    @cached_property
    def _slots(self) -> dict[str, list[Slot]]:
        return {}

    def slots(self, key: str) -> list[Slot]:
        """Return the chunks of a key; their headers are read once."""
        if key not in self._slots:
            on_disk = self.keys[key]
            slots = self.directory.slots(on_disk)
            if on_disk in self.directory.unflattened:
                grid, whole = self.directory.tensors[on_disk].shape[:-1], self.directory.unflattened[on_disk]
                slots = [part for slot in slots for part in _unflattened(slot, grid, whole)]
            self._slots[key] = slots
        return self._slots[key]

    def _slots_at(self, key: str, axes: int) -> SlotsByPlace:
        """Return the chunks of a key by the indices of its leading axes, without these axes:
        a key may have one chunk per layer and expert.
        """
        if self.reserved is not None:
            return self.reserved[self.keys[key]]
        if key not in self._by_place:
            by_place: SlotsByPlace = {}
            for slot in self.slots(key):
                for place in _places(slot.box, axes):
                    held, selected = by_place.get(place), slot.select(*place)
                    if held is None:
                        by_place[place] = [selected]
                    else:
                        held.append(selected)
            self._by_place[key] = by_place
        return self._by_place[key]

    @cached_property
    def _by_place(self) -> dict[str, SlotsByPlace]:
        return {}

    @cached_property
    def dialect(self) -> str:
        """`stacked`, `per_layer` or `singleton`."""
        if not any(re.search(r"decoder\.layers\.\d+\.", key) for key in self.keys):
            return "stacked"
        singleton = re.compile(r"linear_fc1\.(weight|bias)_[wv]$|\.experts\.experts\.\d+\.")
        return "singleton" if any(singleton.search(key) for key in self.keys) else "per_layer"

    def locate(self, weight: Weight, at: Index, dims: Dims, findings: Findings) -> list[Slot]:
        """Return the boxes of one global tensor. What is missing or misshapen is noted in `findings`."""
        if weight.mcore is None:
            return []
        axes = self._axes(weight.mcore)
        shard, name = weight.shard, spell(drop(weight.mcore, *axes), at)
        if name not in self.keys and shard.is_gated and f"{name}_w" in self.keys:
            shard = GATED_APART  # gate and up under keys of their own
        parts = keyed_parts(name, dims.shape(weight.shape), dims.sized(shard))
        lead = tuple([dims.num_layers if axis == "layer" else dims.num_experts or 0 for axis in axes])
        place = tuple([getattr(at, axis) for axis in axes])
        slots: list[Slot] = []
        for part, start, shape in parts:
            meta = self.tensors.get(part)
            wanted = (*lead, *shape)
            shown = f"{self.label}{part}" if self.label else part
            if not findings.expect(shown, meta, wanted, rows_at_least=weight.vocab):
                continue
            here = self._slots_at(part, len(place)).get(place, ())
            slots += [slot.moved(start) for slot in here] if start else here
        return slots

    def dtype_of(self, weight: Weight, at: Index) -> str | None:
        """Return the dtype of a weight; None if it is missing."""
        metas = (self.tensors.get(name) for name in self._names(weight, at))
        return next((meta.dtype for meta in metas if meta is not None), None)

    def holds(self, weight: Weight, at: Index) -> bool:
        """Return whether there is a key for a weight, or for the first of its parts."""
        return any(name in self.keys for name in self._names(weight, at))

    def _names(self, weight: Weight, at: Index) -> tuple[str, str]:
        """Return the possible names of a weight, or of the first of its parts."""
        assert weight.mcore is not None
        name = spell(drop(weight.mcore, *self._axes(weight.mcore)), at)
        return (f"{name}.{weight.shard.names[0]}" if weight.shard.names else name, f"{name}_w")

    def _axes(self, template: str) -> tuple[str, ...]:
        """Return the placeholders that are leading axes in this dialect."""
        return axes_of(template, self.dialect)


# Gate and up as parts with separate keys.
GATED_APART = Shard(0, (1, 1), ("_w", "_v"))


def keyed_parts(name: str, shape: Shape, shard: Shard) -> list[tuple[str, int, Shape]]:
    """Return the keys of a weight, usually one, each with its first row and the shape of its tensor."""
    if not shard.names or shard.dim != 0:
        return [(name, 0, shape)]
    keys = [f"{name}{part}" if shard == GATED_APART else f"{name}.{part}" for part in shard.names]
    lengths = shard.lengths(shape[0])
    starts = itertools.accumulate(lengths, initial=0)
    return [(key, start, (rows, *shape[1:])) for key, start, rows in zip(keys, starts, lengths, strict=False)]


@lru_cache
def axes_of(template: str, dialect: str) -> tuple[str, ...]:
    """Return the placeholders of a name that are leading axes in a dialect; predicting layers are never stacked."""
    held = tuple(axis for axis in placeholders_of(template) if axis != "mtp")
    return {"stacked": held, "per_layer": tuple(axis for axis in held if axis == "expert"), "singleton": ()}[dialect]


# Norms that are separate modules in the local layer spec with latent attention.
OWN_NORMS = {
    own: fused for fused, own in FUSED_NORMS.items() if own.startswith("self_attention.") or own == EXPERT_NORM
}


def with_fused_norms(keys: Mapping[str, str], model: Collection[str]) -> dict[str, str]:
    """Return the keys with the norms in layers renamed as in Transformer Engine models.

    Args:
        model: the names of the model's weights, which show the layers with experts and with latent attention.
    """
    return {_fused(key, model): on_disk for key, on_disk in keys.items()}


def _fused(key: str, keys: Collection[str]) -> str:
    head, separator, tail = key.partition(DENSE_NORM)
    if separator:
        return f"{head}{EXPERT_NORM}{tail}" if f"{head}{ROUTER}" in keys else key
    for own, fused in OWN_NORMS.items():
        head, separator, tail = key.partition(own)
        if separator and f"{head}{LATENT}" in keys and not (own == EXPERT_NORM and f"{head}{ROUTER}" in keys):
            return f"{head}{fused}{tail}"
    return key


def _places(box: Box, axes: int) -> Iterable[tuple[int, ...]]:
    """Return the indices of the leading axes that a chunk covers."""
    start, sizes = box.offsets[:axes], box.sizes[:axes]
    if sizes == (1,) * axes:  # one layer, and one expert
        return (start,)
    return itertools.product(*(range(at, at + size) for at, size in zip(start, sizes, strict=True)))


def _unflattened(slot: Slot, grid: Shape, whole: Shape) -> Iterator[Slot]:
    """Yield the boxes of a tensor of shape `whole` in a chunk of its flattened form.

    The flattened shape is `(*grid, elements of a local tensor)`: each cell of the grid was flattened separately, and
    the part of a data-parallel rank may begin and end anywhere in it.
    """
    local = tuple(size // count for size, count in zip(whole, grid, strict=True))
    for shift in itertools.product(*map(range, slot.box.sizes[:-1])):
        view = slot.view
        for index in shift:
            view = view.select(index)
        cell = (at + by for at, by in zip(slot.box.offsets, shift, strict=False))
        outside = Box(tuple(at * size for at, size in zip(cell, local, strict=True)), local)
        yield from slots_of_flat([(slot.box.offsets[-1], view)], 0, Local(local, ((Box.whole(local), outside),)))
