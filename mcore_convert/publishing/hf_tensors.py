"""The tensors of a checkpoint in any format under their Hugging Face names: where their elements are, and reading them.

A `Plan` tells the same as pairs of file views that are copied; here a tensor is put together in memory, whole or a
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
from mcore_convert.spec.shard import Box
from mcore_convert.storage.elements import Bytes, Files, blocks_of
from mcore_convert.storage.shifts import Shifted
from mcore_convert.storage.views import DTYPE_SIZES, Slot, TensorMeta, cut


@dataclass(frozen=True)
class HfTensor:
    """A tensor by its Hugging Face name, with the dtype that it is stored in.

    `parts` are the boxes of it that files hold; what none of them covers is zero.
    """

    name: str
    meta: TensorMeta
    parts: tuple[Slot, ...]

    @property
    def itemsize(self) -> int:
        return DTYPE_SIZES[self.meta.dtype]

    def read(self, files: Files, box: Box | None = None, dtype: str | None = None) -> Bytes:
        """The elements of a box, or all, as unsigned integers of their size, in row-major order.

        Args:
            dtype: round them to it, once; as they are stored, or decoded to, unless given.

        Raises:
            OverflowError: as `cast`.
        """
        wanted = box or Box.whole(self.meta.shape)
        parts = cut(list(self.parts), wanted)
        if len(parts) == 1 and parts[0].box == wanted:
            return np.ascontiguousarray(files.read(parts[0].view, dtype=dtype))
        whole: Bytes = np.zeros(wanted.sizes, f"u{DTYPE_SIZES[dtype or self.meta.dtype]}")
        for part in parts:
            at = part.box.relative_to(wanted.offsets)
            place = tuple(slice(start, start + size) for start, size in zip(at.offsets, at.sizes, strict=True))
            whole[place] = files.read(part.view, dtype=dtype)
        return whole

    def blocks(self, limit: int) -> Iterator[Box]:
        """Boxes of about `limit` bytes that follow each other in row-major order."""
        shape = self.meta.shape
        for slices in blocks_of(shape, self.itemsize, limit):
            offsets = tuple(part.start for part in slices) + (0,) * (len(shape) - len(slices))
            sizes = tuple(part.stop - part.start for part in slices) + shape[len(slices) :]
            yield Box(offsets, sizes)


def hf_tensors(family: Family, dims: Dims, sources: Sources) -> Iterator[HfTensor]:
    """Every tensor of a Hugging Face directory of this model, in the order of the forward pass."""
    dtype_of = sources.dtype_of
    for item, slots in sources.slots.items():
        weight = item.weight
        shape = family.shape(weight, dims)
        parts: list[list[Slot]] = [[] for _ in weight.hf]
        for piece in weight.pack.pieces(shape, dims):
            for part in cut(slots, piece.mcore):
                at = part.box.relative_to(piece.mcore.offsets)
                view, at = (part.view.transposed, at.transposed) if piece.transposed else (part.view, at)
                offsets = tuple(low + start for low, start in zip(piece.hf.offsets, at.offsets, strict=True))
                if weight.less:
                    view = Shifted.of(str(item), view, weight.less)
                parts[piece.tensor].append(Slot(view, Box(offsets, at.sizes)))
        for template, own_shape, own in zip(weight.hf, weight.pack.shapes(shape, dims), parts, strict=True):
            yield HfTensor(spell(template, item.at), TensorMeta(own_shape, dtype_of[item]), tuple(own))
