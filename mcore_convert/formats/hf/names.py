"""Checkpoints with Hugging Face's names: the boxes of each weight, for tensors in any number of parts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

from mcore_convert.formats.base import Checkpoint, Findings
from mcore_convert.spec.dims import Dims
from mcore_convert.spec.family import Item, Spelling
from mcore_convert.spec.names import spell
from mcore_convert.spec.pack import Every, Piece, packed
from mcore_convert.spec.shard import Box
from mcore_convert.storage.shifts import Shifted
from mcore_convert.storage.views import Slot, TensorMeta, cut


class HfNames(Checkpoint):
    """A checkpoint whose tensors have the names of their family, possibly without `prefix` (GPT-2's `transformer.`)."""

    prefix: str

    @abstractmethod
    def meta_of(self, name: str) -> TensorMeta | None:
        """Return the shape and the dtype of a tensor; None if there is none of this name."""

    @abstractmethod
    def parts_of(self, name: str) -> list[Slot]:
        """Return the parts of a tensor in files."""

    def locate(self, item: Item, dims: Dims, findings: Findings) -> list[Slot]:
        weight, at, _ = item
        shape = dims.shape(weight.shape)
        spelling, names = self._spelled(item)
        tensors = []
        shapes, pieces = packed(spelling.pack, shape, dims)
        for template, name, one in zip(spelling.hf, names, shapes, strict=True):
            joined = at.expert if weight.is_joined(template) else None
            expected = one if joined is None else (dims.num_experts or 0, *one)
            if findings.expect(self.key_of(name), self.meta_of(name), expected):
                parts = self.parts_of(name)
                if joined is not None:
                    parts = [part.select(joined) for part in parts if joined in rows_of(part)]
                tensors.append(parts)
        if len(tensors) < len(spelling.hf):
            return []
        slots = [slot for piece in pieces for slot in _slots(piece, tensors[piece.tensor])]
        if not weight.less:
            return slots
        return [slot._replace(view=Shifted.of(str(item), slot.view, -weight.less)) for slot in slots]

    def key_of(self, name: str) -> str:
        """Return the name of a tensor in the files."""
        return name

    def _spelled(self, item: Item) -> tuple[Spelling, list[str]]:
        """Return the first spelling of a weight of which the directory has a tensor, and its names; else the first
        spelling.
        """
        spellings = item.weight.spellings
        for spelling in spellings:
            names = [spell(template, item.at) for template in spelling.hf]
            if self.prefix:
                names = [*map(self.name_of, names)]
            if len(spellings) == 1 or any(self.meta_of(name) is not None for name in names):
                return spelling, names
        return spellings[0], [self.name_of(spell(template, item.at)) for template in spellings[0].hf]

    def name_of(self, name: str) -> str:
        """Return the name of a tensor in the directory: without the optional prefix if it is stored without it."""
        if not self.prefix:
            return name
        short = name.removeprefix(self.prefix)
        return short if self.meta_of(name) is None and self.meta_of(short) is not None else name


def rows_of(slot: Slot) -> range:
    """Return the range of the first dimension that a slot covers."""
    return range(slot.box.offsets[0], slot.box.offsets[0] + slot.box.sizes[0])


def part_of_every(slot: Slot, every: Every) -> Slot:
    """Return the part of a slot at every `step`-th index of a dimension, as a slot of the tensor of these indices."""
    view, axis, box = slot.view, every.axis, every.box(slot.box)
    first = every.index_of(box.offsets[axis]) - slot.box.offsets[axis]
    strides = tuple(step * every.step if number == axis else step for number, step in enumerate(view.strides))
    return Slot(view._replace(offset=view.offset + first * view.strides[axis], shape=box.sizes, strides=strides), box)


def _slots(piece: Piece, parts: list[Slot]) -> Iterator[Slot]:
    """Yield the boxes of the global tensor that the parts of a Hugging Face tensor hold for a piece."""
    if piece.every is not None:
        parts = [part_of_every(part, piece.every) for part in parts]
    elif len(parts) == 1 and parts[0].box == piece.hf:  # fast path: one part, one piece, as for experts
        view = parts[0].view
        yield Slot(view.transposed if piece.transposed else view, piece.mcore)
        return
    for view, box in cut(parts, piece.hf):
        inside = box.relative_to(piece.hf.offsets)
        there = inside.transposed if piece.transposed else inside
        offsets = tuple(start + at for start, at in zip(piece.mcore.offsets, there.offsets, strict=True))
        yield Slot(view.transposed if piece.transposed else view, Box(offsets, there.sizes))
