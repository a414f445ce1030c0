"""Sums over whole sequences, whose tokens are spread over ranks by context parallelism."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_whole = False  # whether values are those of whole sequences, whatever the layout


def sum_over_sequence(values: Tensor) -> Tensor:
    """Return the sums of token values over whole sequences: `[rows, ...]` from `[rows, tokens, ...]`.

    Under context parallelism a rank has a part of each sequence. Each rank of the group gets the same sums, and the
    gradient of each rank's loss reaches the tokens of all of them. A flow's total and count from such sums are then
    the same on all of these ranks, and their quotient is that of one rank. All ranks must make the same calls.
    """
    from megatron.core import parallel_state

    sums = values.sum(1)
    if _whole or not parallel_state.model_parallel_is_initialized():
        return sums
    if parallel_state.get_context_parallel_world_size() == 1:
        return sums
    summed: Tensor = _SumOverRanks.apply(sums, parallel_state.get_context_parallel_group())
    return summed


@contextlib.contextmanager
def whole_sequences() -> Iterator[None]:
    """Scope in which `sum_over_sequence` gets whole sequences, and sums nothing over ranks."""
    global _whole
    before, _whole = _whole, True
    try:
        yield
    finally:
        _whole = before


class _SumOverRanks(torch.autograd.Function):
    """Sum over the ranks of a group; its gradient is the sum of theirs, since each of them uses the sum."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _summed(values, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _summed(gradient, ctx.group), None


def _summed(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    summed = values.contiguous().clone()
    dist.all_reduce(summed, group=group)
    return summed
