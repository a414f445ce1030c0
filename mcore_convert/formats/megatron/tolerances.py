"""Tolerances for runs whose master copies do not round to the stored weights.

With `--fp8-param-gather` or `--fp4-param-gather` a run keeps the matrices of its layers in 8 or 4 bits, and saves them
dequantised (Megatron Core 0.16 to 0.19, `dist_checkpointing`; the master copies are exact). With
`--main-params-dtype fp16` the master copies are rounded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mcore_convert.errors import UnreadableCheckpoint
from mcore_convert.spec.family import Weight
from mcore_convert.spec.names import Index
from mcore_convert.storage.rounding import Tolerance

LINEAR = re.compile(r"decoder\.layers\..*\.(linear_\w+|(in|out)_proj)\.weight")
PACKED = "uint8"  # the dtype of buffers of such weights

# Half of the widest relative gap between neighbours, for a scale that is a power of two or rounded itself, and the
# error below the smallest normal number: for e4m3 (3 bits of mantissa) and e2m1 (1 bit).
FP8 = Tolerance("fp8", 1 / 8, 1 / 256)
FP4 = Tolerance("fp4", 1 / 4, 1 / 16)
HALF_MASTERS = Tolerance("master copies in fp16", 1 / 128, 2.0**-20)


def is_quantised(args: Mapping[str, Any], weight: Weight, at: Index) -> bool:
    """Return whether a run keeps a weight in fewer bits: the matrices of Transformer Engine's linear layers."""
    if not (args.get("fp8_param_gather") or args.get("fp4_param_gather")):
        return False
    if weight.mcore is None or at.layer is None or LINEAR.fullmatch(weight.mcore) is None:
        return False
    if not args.get("first_last_layers_bf16"):
        return True
    ends = (args.get(f"num_layers_at_{end}_in_bf16") for end in ("start", "end"))
    first, last = (1 if count is None else count for count in ends)
    return bool(first <= at.layer < (args.get("num_layers") or 0) - last)


def tolerance_of(args: Mapping[str, Any], weight: Weight, at: Index) -> Tolerance | None:
    """Return the tolerance between a master copy and its weight; None if it must round to the weight."""
    if is_quantised(args, weight, at):
        return FP4 if args.get("fp4_param_gather") else FP8
    return HALF_MASTERS if "16" in str(args.get("main_params_dtype")) else None


def refuse_remainders(args: Mapping[str, Any], where: object) -> None:
    """Refuse remainders of quantised weights: the weights to which they belong were not saved.

    Raises:
        UnreadableCheckpoint: the run quantised its weights.
    """
    if args.get("fp8_param_gather") or args.get("fp4_param_gather"):
        raise UnreadableCheckpoint(
            f"`{where}` keeps master weights as remainders of weights that were quantised, and are not in it",
            hint="leave the optimizer state behind with --no-optimizer",
        )
