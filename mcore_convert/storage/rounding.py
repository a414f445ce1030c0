"""The proof that a master copy is that of a weight: it rounds to it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mcore_convert.storage.values import Bytes, round_to


def rounds_to(array: Bytes, other: Bytes, dtype: str) -> NDArray[np.bool_]:
    """Where fp32 values, rounded to a dtype, are the elements of another array, both as unsigned integers.

    Halfway between two bfloat16 either counts: torch rounds to the even one, Transformer Engine's Adam away from zero
    where it keeps remainders (`multi_tensor/adam.cu`, `AdamFunctorMasterParamRemainder`).
    """
    equal: NDArray[np.bool_] = round_to(array, dtype) == other
    if dtype == "bfloat16" and not equal.all():
        equal |= ((array & 0xFFFF) == 0x8000) & ((array >> 16) + 1 == other)
    return equal
