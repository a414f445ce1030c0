"""The proof that a master copy is that of a weight: it rounds to it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mcore_convert.storage.values import Bytes, as_float, round_to


class Tolerance(NamedTuple):
    """How far a master copy may be from a weight: a share of itself, and one of the largest in the same block.

    `kind` says of what the weight was rounded.
    """

    kind: str
    relative: float
    of_largest: float


def rounds_to(array: Bytes, other: Bytes, dtype: str) -> NDArray[np.bool_]:
    """Return where fp32 values, rounded to a dtype, are the elements of another array, both as unsigned integers.

    Halfway between two bfloat16 either counts: torch rounds to the even one, Transformer Engine's Adam away from zero
    where it keeps remainders (`multi_tensor/adam.cu`, `AdamFunctorMasterParamRemainder`).
    """
    equal: NDArray[np.bool_] = round_to(array, dtype) == other
    if dtype == "bfloat16" and not equal.all():
        equal |= ((array & 0xFFFF) == 0x8000) & ((array >> 16) + 1 == other)
    return equal


def are_masters(masters: Bytes, weights: Bytes, dtype: str, near: Tolerance | None = None) -> bool:
    """Return whether fp32 values round to others, or all of them are as near as is allowed; as unsigned integers."""
    if rounds_to(masters, weights, dtype).all():
        return True
    if near is None:
        return False
    exact, held = as_float(masters, "float32"), as_float(weights, dtype)
    sizes = np.abs(exact)
    allowed = near.relative * sizes + near.of_largest * sizes.max(initial=0.0)
    return bool((np.abs(exact - held) <= allowed).all())
