"""`forward_step`: one microbatch through this rank's stage of the model, as Megatron's pipeline schedules call it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mcore_convert.errors import ConvertError
from train_entry.flows.base import REFERENCE, Batch, Flow, count_unit

# Sums of a microbatch on the last stage: of token losses, of their number, and of the further metrics of a flow.
Sums = dict[str, Tensor]


def forward_step(
    flow: Flow,
    prove: Callable[[Tensor, Batch], None] | None,
    in_tokens: bool,
    microbatches: Iterator[Batch],
    model: Any,
) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """Run this stage and return its output, and the loss function of the last stage.

    The microbatch is moved to the device, and cut to this rank's part of the sequence under context parallelism.

    Args:
        prove: called with the output of the last stage and the batch, before the loss is computed.
        in_tokens: whether Megatron needs sums and numbers in tokens even where the flow counts samples.
    """
    whole = dict(next(microbatches))
    reference = whole.pop(REFERENCE, None)  # computed here, for this rank's part
    batch = on_this_rank(whole)
    if reference is not None:
        batch[REFERENCE] = reference
    return flow.forward(model, batch), partial(_loss, flow, prove, in_tokens, batch)


def reference_step(flow: Flow, microbatches: Iterator[Batch], model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """Run a stage of a reference model; the last stage returns its output among the sums."""
    output = flow.forward(model, on_this_rank(dict(next(microbatches))))
    count = torch.ones((), dtype=torch.int, device=output.device)
    return output, lambda last: (last.sum(), count, {REFERENCE: last.detach()})


def on_this_rank(batch: Batch) -> Batch:
    """Return a microbatch on the device of this rank, cut to its part of each sequence: an early and a late chunk."""
    from megatron.core import parallel_state
    from megatron.core.utils import get_batch_on_this_cp_rank

    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    moved = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
    cut: Batch = get_batch_on_this_cp_rank(moved, parallel_state.get_context_parallel_group())
    return cut


def _loss(
    flow: Flow, prove: Callable[[Tensor, Batch], None] | None, in_tokens: bool, batch: Batch, output: Tensor
) -> tuple[Tensor, Tensor, Sums]:
    """Return the sum of losses, for the backward pass; their number, by which Megatron divides the gradients; and both.

    Router losses are multiplied by the tokens of a microbatch before that division (Megatron Core 0.16.1,
    moe/router.py:466, :498), so the number must be one of tokens. A factor on both leaves the loss itself unchanged.
    """
    if prove is not None:
        prove(output, batch)
    loss = flow.loss(output, batch)
    count = loss.count.to(torch.int)
    sums = {"total": loss.total.detach().float(), "count": count.float(), **loss.metrics}
    unit = count_unit(flow, next(iter(batch.values())).shape[1]) if in_tokens else 1
    total = loss.total * unit if unit > 1 else loss.total
    return total, count * unit, {name: value.detach() for name, value in sums.items()}


def own_forward_step(
    function: Callable[..., Any], microbatches: Iterator[Batch], model: Any
) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """Run a `forward_step` of the user: `(data_iterator, model)` to an output and its loss function.

    As with Megatron-LM, the loss function returns the sum of losses, their number and a report, each value a number or
    a pair of a sum and a count; or a mean and a report, whose values are then averaged over microbatches.
    """
    output, loss_function = function(microbatches, model)
    return output, partial(_own_loss, loss_function)


def _own_loss(loss_function: Callable[[Tensor], Any], output: Tensor) -> tuple[Tensor, Tensor, Sums]:
    from megatron.core import parallel_state

    total, *counted, report = loss_function(output)
    if not counted and parallel_state.get_context_parallel_world_size() > 1:
        raise ConvertError(
            "a loss function that returns a mean does not say how many tokens a part of a sequence has",
            hint="return the sum of the losses, their number and what to report: (loss, num_tokens, report)",
        )
    count = counted[0].to(torch.int) if counted else torch.ones((), dtype=torch.int, device=total.device)
    sums = {"total": total.detach().float(), "count": count.float()}
    for name, value in report.items():
        flat = torch.stack([torch.as_tensor(each) for each in value]) if isinstance(value, tuple | list) else value
        flat = torch.as_tensor(flat, device=total.device).detach().float().reshape(-1)
        # the sum of a pair; a single number is a mean already
        sums[name] = flat[0] if len(flat) > 1 else flat[0] * count
    return total, count, sums
