"""`forward_step`: one microbatch through this rank's stage of the model, as Megatron's pipeline schedules call it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from train_entry.flows.base import Batch, Flow

# What the last stage tells of a microbatch: the sum of token losses, their number, and what else a flow sums up.
Told = dict[str, Tensor]


def forward_step(
    flow: Flow, prove: Callable[[Tensor, Batch], None] | None, microbatches: Iterator[Batch], model: Any
) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """The output of this stage, and what makes the loss of it on the last one.

    The microbatch is brought to the device, and cut to this rank's part of the sequence under context parallelism.

    Args:
        prove: called with the output of the last stage and the batch, before the loss is computed.
    """
    batch = on_this_rank(next(microbatches))
    return flow.forward(model, batch), partial(_loss, flow, prove, batch)


def on_this_rank(batch: Batch) -> Batch:
    """A microbatch on the device of this rank, and its part of each sequence: two chunks, one early and one late."""
    from megatron.core import parallel_state
    from megatron.core.utils import get_batch_on_this_cp_rank

    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    moved = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
    cut: Batch = get_batch_on_this_cp_rank(moved, parallel_state.get_context_parallel_group())
    return cut


def _loss(
    flow: Flow, prove: Callable[[Tensor, Batch], None] | None, batch: Batch, output: Tensor
) -> tuple[Tensor, Tensor, Told]:
    """The sum of losses, to go backward from; their number, which Megatron divides the gradients by; and both."""
    if prove is not None:
        prove(output, batch)
    loss = flow.loss(output, batch)
    count = loss.count.to(torch.int)
    told = {"total": loss.total.detach().float(), "count": count.float(), **loss.metrics}
    return loss.total, count, {name: value.detach() for name, value in told.items()}
