"""The tensors of a checkpoint in any format under their Hugging Face names: their location, and reading them.

A `Plan` holds the same as pairs of file views to copy; here a tensor is assembled in memory, whole or a
block of rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mcore_convert.checkpoints.weights import Sources
from mcore_convert.spec.dims import Dims
from mcore_convert.spec.family import Family
from mcore_convert.spec.names import spell
from mcore_convert.spec.pack import Every
from mcore_convert.spec.shard import Box
from mcore_convert.storage.elements import Bytes, Files, blocks_of
from mcore_convert.storage.shifts import Shifted
from mcore_convert.storage.views import DTYPE_SIZES, Slot, TensorMeta, View, cut


@dataclass(frozen=True)
class HfTensor:
    """Tensor by its Hugging Face name, with the dtype that it is stored in.

    `parts` are its boxes that files hold; elements outside of them are zero. Under a key other than None they are
    boxes of the tensor of these indices alone.
    """

    name: str
    meta: TensorMeta
    parts: dict[Every | None, list[Slot]]

    @property
    def itemsize(self) -> int:
        return DTYPE_SIZES[self.meta.dtype]

    def read(self, files: Files, box: Box | None = None, dtype: str | None = None) -> Bytes:
        """Return the elements of a box, or of the tensor, as unsigned integers of their size, in row-major order.

        Args:
            dtype: round them to it, once; unless given they stay as stored, or as decoded.

        Raises:
            OverflowError: as `cast`.
        """
        wanted = box or Box.whole(self.meta.shape)
        parts = cut(self.parts.get(None, []), wanted)
        if len(parts) == 1 and parts[0].box == wanted:
            return np.ascontiguousarray(files.read(parts[0].view, dtype=dtype))
        whole: Bytes = np.zeros(wanted.sizes, f"u{DTYPE_SIZES[dtype or self.meta.dtype]}")
        for every, slots in self.parts.items():
            inside, lane = wanted, whole
            if every is not None:
                inside = every.box(wanted)
                first = every.index_of(inside.offsets[every.axis]) - wanted.offsets[every.axis]
                lane = whole[(*(slice(None),) * every.axis, slice(first, None, every.step))]
            for part in cut(slots, inside):
                at = part.box.relative_to(inside.offsets)
                place = tuple(slice(start, start + size) for start, size in zip(at.offsets, at.sizes, strict=True))
                lane[place] = files.read(part.view, dtype=dtype)
        return whole

    def blocks(self, limit: int) -> Iterator[Box]:
        """Yield boxes of about `limit` bytes that follow each other in row-major order."""
        shape = self.meta.shape
        for slices in blocks_of(shape, self.itemsize, limit):
            offsets = tuple(part.start for part in slices) + (0,) * (len(shape) - len(slices))
            sizes = tuple(part.stop - part.start for part in slices) + shape[len(slices) :]
            yield Box(offsets, sizes)


def hf_tensors(family: Family, dims: Dims, sources: Sources) -> Iterator[HfTensor]:
    """Yield every tensor of a Hugging Face directory of this model, in the order of the forward pass."""
    dtype_of = sources.dtype_of
    tensors: dict[str, HfTensor] = {}
    for item, slots in sources.slots.items():
        weight = item.weight
        shape = family.shape(weight, dims)
        names = [spell(template, item.at) for template in weight.hf]
        joined = [item.at.expert if weight.is_joined(template) else None for template in weight.hf]
        for name, own_shape, expert in zip(names, weight.pack.shapes(shape, dims), joined, strict=True):
            whole = own_shape if expert is None else (dims.num_experts or 0, *own_shape)
            tensors.setdefault(name, HfTensor(name, TensorMeta(whole, dtype_of[item]), {}))
        for piece in weight.pack.pieces(shape, dims):
            own = tensors[names[piece.tensor]].parts
            for part in cut(slots, piece.mcore):
                at = part.box.relative_to(piece.mcore.offsets)
                view, at = (part.view.transposed, at.transposed) if piece.transposed else (part.view, at)
                offsets = tuple(low + start for low, start in zip(piece.hf.offsets, at.offsets, strict=True))
                if weight.less:
                    view = Shifted.of(str(item), view, weight.less)
                slot, every, expert = Slot(view, Box(offsets, at.sizes)), piece.every, joined[piece.tensor]
                if expert is not None:
                    slot, every = _of_expert(slot, expert), every and every._replace(axis=every.axis + 1)
                own.setdefault(every, []).append(slot)
    yield from tensors.values()


def _of_expert(slot: Slot, expert: int) -> Slot:
    """Return the slot of one expert's tensor, as a slot of the tensor with all experts along its first dimension."""
    return Slot(_stacked(slot.view), Box((expert, *slot.box.offsets), (1, *slot.box.sizes)))


def _stacked(view: View) -> View:
    """Return the view with a leading dimension of size 1."""
    high = view.high and _stacked(view.high)
    return view._replace(shape=(1, *view.shape), strides=(view.nbytes, *view.strides), high=high)
