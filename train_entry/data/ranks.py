"""Work that rank 0 does before the others, which then use its cached result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from mcore_convert.errors import ConvertError, DataError

Result = TypeVar("Result")


def rank_0_first(work: Callable[[], Result]) -> Result:
    """Return the result of `work` on this rank; rank 0 runs it first. Within it no rank may wait for others.

    Raises:
        ConvertError: rank 0's refusal, on every rank; or this rank's own.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return work()
    refusal: list[Any] = [None]
    first = dist.get_rank() == 0
    try:
        if first:
            try:
                result = work()
            except ConvertError as error:
                refusal = [(error.message, error.items, error.hint)]
                raise
            except BaseException as error:
                refusal = [(f"rank 0 failed: {error!r}", (), None)]
                raise
    finally:
        dist.broadcast_object_list(refusal, 0)
    if first:
        return result
    if refusal[0] is not None:
        message, items, hint = refusal[0]
        raise DataError(message, items=items, hint=hint)
    return work()
