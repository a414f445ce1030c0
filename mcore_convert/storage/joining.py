"""Elements stored in two parts: fp32 as a bfloat16 and a 16-bit remainder.

Transformer Engine's `FusedAdam` keeps master weights this way with `store_param_remainders` (2.1 to 2.18,
`common/multi_tensor/adam.cu`, `AdamFunctorMasterParamRemainder`): the weight is the upper half of the master copy,
rounded to nearest with ties away from zero, and the remainder is its lower half as an int16. So the remainder is added
to the bits of the weight, and every pair of a weight and a remainder is one fp32 number.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcore_convert.errors import UnreadableCheckpoint
from mcore_convert.storage.views import Slot, View, cut

REMAINDER = "int16"  # its dtype in buckets; a gathered remainder is a number in fp32
LARGEST = 2**15


def join_views(remainder: View, weight: View) -> View:
    """Return the view of the fp32 numbers of which remainders and weights, views of equal shape, are the two parts."""
    assert (remainder.shape, remainder.high, weight.dtype) == (weight.shape, None, "bfloat16")
    return remainder._replace(dtype="float32", high=weight, low_dtype=remainder.dtype)


def join_slots(remainders: list[Slot], weights: list[Slot]) -> list[Slot]:
    """Return the slots of the fp32 numbers; boxes of a remainder without a weight are skipped."""
    pairs = ((slot, part) for slot in remainders for part in cut(weights, slot.box))
    return [Slot(join_views(slot.part(part.box), part.view), part.box) for slot, part in pairs]


def are_remainders(numbers: NDArray[np.float32]) -> bool:
    """Return whether fp32 numbers can be gathered remainders: integers of 16 bits."""
    return bool(((numbers == np.rint(numbers)) & (numbers >= -LARGEST) & (numbers < LARGEST)).all())


def joined(remainders: NDArray[Any], weights: NDArray[Any], view: View) -> NDArray[Any]:
    """Return the bits of the fp32 numbers, from the bits of both parts.

    Args:
        view: the view of the numbers, for the message.

    Raises:
        UnreadableCheckpoint: a remainder in fp32 is not an integer of 16 bits.
    """
    if view.low_dtype == REMAINDER:
        added = remainders.view(np.int16).astype(np.int32)
    else:
        numbers = np.ascontiguousarray(remainders).view(np.float32)
        if not are_remainders(numbers):
            raise UnreadableCheckpoint(
                f"`{view.path}` holds a number that is no 16-bit remainder of a master weight",
                hint="the optimizer's state is damaged: --no-optimizer takes the weights alone",
            )
        added = numbers.astype(np.int32)
    bits: NDArray[Any] = weights.astype(np.uint32) << 16
    bits += added.view(np.uint32)
    return bits
