"""Shifted tensors: norms that one side stores minus one. A shift is exact, or it is refused.

If one is added in float32, the sum is the float32 that Megatron Core computes with: Transformer Engine's norms add it
in the same way. If numbers are cast to another dtype, which rounds every weight, the sum is rounded as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mcore_convert.errors import ConvertError
from mcore_convert.storage.digests import Feed, hand_on
from mcore_convert.storage.values import Bytes, as_float, round_to
from mcore_convert.storage.views import Access, Coded, View


@dataclass(frozen=True, order=True, slots=True)
class Shifted(Coded):
    """A vector that files hold minus `by`, in the same dtype."""

    by: float

    @staticmethod
    def of(name: str, view: View, by: float) -> View:
        """Return a view of a vector with `by` added to each element."""
        return View.decoded(Shifted((name,), (view,), view.shape, by), view.dtype)

    def read(self, files: Access, view: View, dtype: str) -> Bytes:
        return self._added(files, self.under(view), self.by, dtype)

    def write(self, files: Access, source: View, target: View, feed: Feed | None) -> Iterator[int]:
        """Copy a view to a view of this tensor; yield the bytes read.

        Raises:
            ConvertError: a number minus `by` is not exact in the dtype.
        """
        stored = self.under(target)
        with files.target(stored) as written:
            written[...] = self._added(files, source, -self.by, stored.dtype)
            hand_on(feed, stored, written)
        yield source.nbytes

    def under(self, view: View) -> View:
        """Return the stored view under a view of the vector."""
        (part,) = self.parts
        return part._replace(offset=part.offset + view.offset, shape=view.shape, strides=view.strides)

    def _added(self, files: Access, view: View, by: float, dtype: str) -> Bytes:
        exact = files.read(view, dtype="float32").view(np.float32).astype(np.float64) + by
        with np.errstate(over="ignore"):
            narrow = exact.astype(np.float32).view(np.uint32)
        rounded = narrow if dtype == "float32" else round_to(narrow, dtype)
        is_cast, is_computed = dtype not in (view.dtype, "float32"), dtype == "float32" and by > 0
        lost = 0 if is_cast or is_computed else int(np.count_nonzero(as_float(rounded, dtype) != exact))
        if lost:
            raise ConvertError(
                f"`{self.names[0]}` cannot be stored with {by:+g} added: {lost} of {exact.size} numbers need more bits "
                f"than {dtype} has",
                hint="convert it in float32; a run's master copies may be rounded: --from-master --dtype bfloat16",
            )
        return rounded
