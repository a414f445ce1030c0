"""Master copies stored as remainders of the weights, by Megatron's distributed optimizer if it is precision-aware.

`dp_reshardable` and `fully_sharded_model_space` store them unchanged, in int16. `fully_reshardable` and
`distrib_optim.pt` gather state: remainders are copied into fp32 buffers and become numbers (Megatron Core 0.13 to 0.19,
`distrib_optimizer.py`, `get_parameter_state_dp_zero`), which Megatron Core can save but not load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any

import numpy as np

from mcore_convert.spec.shard import Box
from mcore_convert.storage.elements import Files
from mcore_convert.storage.joining import REMAINDER, are_remainders, join_slots
from mcore_convert.storage.views import Slot, View

FLAG = "use_precision_aware_optimizer"
SAMPLES = 64  # tensors, and elements of each


def are_gathered(args: Mapping[str, Any], masters: Iterable[View]) -> bool:
    """Return whether the fp32 tensors of master copies contain remainders as numbers.

    A sample decides: all are integers of 16 bits, some not zero. The other elements are checked when they are read.
    """
    if args.get(FLAG) is False:
        return False
    some = False
    with Files() as files:
        for view in islice(masters, SAMPLES):
            if view.dtype != "float32" or not view.shape or not view.nbytes:
                return False
            first = Box((0,) * len(view.shape), (*(1 for _ in view.shape[1:]), min(view.shape[-1], SAMPLES)))
            numbers = np.ascontiguousarray(files.read(view.narrow(first))).view(np.float32)
            if not are_remainders(numbers):
                return False
            some = some or bool(numbers.any())
    return some


def whole_masters(masters: list[Slot], weights: Callable[[], list[Slot]], *, gathered: bool) -> list[Slot]:
    """Return the master copies in fp32: remainders are joined with their weights.

    Args:
        gathered: remainders are stored as fp32 numbers, except for weights that are in fp32 themselves.
    """
    if not masters or not (gathered or masters[0].view.dtype == REMAINDER):
        return masters
    held = weights()
    return join_slots(masters, held) if held and held[0].view.dtype == "bfloat16" else masters
