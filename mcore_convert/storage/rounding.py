"""The check that a master copy belongs to a weight: it rounds to the weight."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mcore_convert.storage.values import Bytes, as_float, round_to


class Tolerance(NamedTuple):
    """Largest distance of a master copy from its weight: a share of the value, plus one of the block's largest value.

    `kind` names the rounding.
    """

    kind: str
    relative: float
    of_largest: float


def rounds_to(array: Bytes, other: Bytes, dtype: str) -> NDArray[np.bool_]:
    """Return a mask: where fp32 values, rounded to a dtype, equal another array; both are unsigned integers.

    For ties between two bfloat16 either counts: torch rounds to even, and Transformer Engine's Adam away from zero if
    it keeps remainders (`multi_tensor/adam.cu`, `AdamFunctorMasterParamRemainder`).
    """
    equal: NDArray[np.bool_] = round_to(array, dtype) == other
    if dtype == "bfloat16" and not equal.all():
        equal |= ((array & 0xFFFF) == 0x8000) & ((array >> 16) + 1 == other)
    return equal


def are_masters(masters: Bytes, weights: Bytes, dtype: str, near: Tolerance | None = None) -> bool:
    """Return whether all fp32 values round to the weights, or all are within the tolerance; as unsigned integers."""
    if rounds_to(masters, weights, dtype).all():
        return True
    if near is None:
        return False
    exact, held = as_float(masters, "float32"), as_float(weights, dtype)
    sizes = np.abs(exact)
    allowed = near.relative * sizes + near.of_largest * sizes.max(initial=0.0)
    return bool((np.abs(exact - held) <= allowed).all())
