"""Operations that are opaque to a graph: communication between ranks, and the gated activation of an MLP.

The compiler must not trace communication: for Megatron's functions, which receive into a preallocated tensor,
torch 2.11 makes a graph whose gradients are silently zero.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.nn import functional


@torch.library.custom_op(
    "train_entry::column_linear",
    mutates_args=(),
    schema="(Tensor hidden, Tensor weight, bool sequence_parallel, str group) -> Tensor",
)
def column_linear(hidden: Tensor, weight: Tensor, sequence_parallel: bool, group: str) -> Tensor:
    """Return the product with this rank's rows of the weight, for all tokens even if each rank holds only some."""
    if sequence_parallel:
        hidden, gathering = _gather(hidden, group)
        gathering.wait()
    return functional.linear(hidden, weight)


@column_linear.register_fake
def _(hidden: Tensor, weight: Tensor, sequence_parallel: bool, group: str) -> Tensor:
    ranks = _ranks(group).size() if sequence_parallel else 1
    return hidden.new_empty(ranks * hidden.size(0), *hidden.shape[1:-1], weight.size(0))


@torch.library.custom_op(
    "train_entry::column_linear_backward",
    mutates_args=(),
    schema="(Tensor gradient, Tensor hidden, Tensor weight, bool sequence_parallel, str group) -> (Tensor, Tensor)",
)
def column_linear_backward(
    gradient: Tensor, hidden: Tensor, weight: Tensor, sequence_parallel: bool, group: str
) -> tuple[Tensor, Tensor]:
    """Return the gradients of hidden states and weight. As in Megatron, communication overlaps with the products.

    `CUDA_DEVICE_MAX_CONNECTIONS=1` ensures that the communication starts first.
    """
    gradient = gradient.contiguous()
    if sequence_parallel:
        hidden, gathering = _gather(hidden, group)
    of_all = gradient @ weight
    if sequence_parallel:
        of_hidden = of_all.new_empty(len(of_all) // _ranks(group).size(), *of_all.shape[1:])
        summing = dist.reduce_scatter_tensor(of_hidden, of_all, group=_ranks(group), async_op=True)
        gathering.wait()
    else:
        of_hidden = of_all
        summing = dist.all_reduce(of_hidden, group=_ranks(group), async_op=True)
    of_weight = gradient.flatten(0, -2).t() @ hidden.flatten(0, -2)
    summing.wait()
    return of_hidden, of_weight


@column_linear_backward.register_fake
def _(gradient: Tensor, hidden: Tensor, weight: Tensor, sequence_parallel: bool, group: str) -> tuple[Tensor, Tensor]:
    return hidden.new_empty(hidden.shape), weight.new_empty(weight.shape)


def _remember_linear(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    hidden, weight, ctx.sequence_parallel, ctx.group = inputs
    ctx.save_for_backward(hidden, weight)


def _linear_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
    gradients = column_linear_backward(gradient, *ctx.saved_tensors, ctx.sequence_parallel, ctx.group)
    return *gradients, None, None


column_linear.register_autograd(_linear_backward, setup_context=_remember_linear)


def _gather(hidden: Tensor, group: str) -> tuple[Tensor, Any]:
    """Return the tokens of all ranks, which are still being gathered, and the operation to wait for."""
    ranks = _ranks(group)
    whole = hidden.new_empty(ranks.size() * len(hidden), *hidden.shape[1:])
    return whole, dist.all_gather_into_tensor(whole, hidden.contiguous(), group=ranks, async_op=True)


def _ranks(group: str) -> dist.ProcessGroup:
    """Return a group by its name, the only form in which a graph operation can receive it."""
    ranks: dist.ProcessGroup = _resolve_process_group(cast(Any, group))
    return ranks


@torch.library.custom_op(
    "train_entry::sum_of_ranks", mutates_args=(), schema="(Tensor part, bool scatter, str group) -> Tensor"
)
def sum_of_ranks(part: Tensor, scatter: bool, group: str) -> Tensor:
    """Return the sum over ranks: of all tokens, or with sequence parallelism of this rank's tokens."""
    ranks = _ranks(group)
    if not scatter:
        whole = part.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(whole, group=ranks)
        return whole
    mine = part.new_empty(len(part) // ranks.size(), *part.shape[1:])
    dist.reduce_scatter_tensor(mine, part.contiguous(), group=ranks)
    return mine


@sum_of_ranks.register_fake
def _(part: Tensor, scatter: bool, group: str) -> Tensor:
    return part.new_empty(len(part) // (_ranks(group).size() if scatter else 1), *part.shape[1:])


@torch.library.custom_op("train_entry::tokens_of_ranks", mutates_args=(), schema="(Tensor mine, str group) -> Tensor")
def tokens_of_ranks(mine: Tensor, group: str) -> Tensor:
    """Return the tokens of all ranks, in the order of the ranks."""
    whole, gathering = _gather(mine, group)
    gathering.wait()
    return whole


@tokens_of_ranks.register_fake
def _(mine: Tensor, group: str) -> Tensor:
    return mine.new_empty(len(mine) * _ranks(group).size(), *mine.shape[1:])


def _remember_ranks(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.scatter, ctx.group = inputs


def _part_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    # every rank uses the whole sum, so that each has the whole gradient already
    return tokens_of_ranks(gradient, ctx.group) if ctx.scatter else gradient, None, None


sum_of_ranks.register_autograd(_part_backward, setup_context=_remember_ranks)


@torch.library.custom_op("train_entry::swiglu", mutates_args=(), schema="(Tensor hidden) -> Tensor")
def _swiglu(hidden: Tensor) -> Tensor:
    if hidden.is_cuda:
        from train_entry.model import kernels

        return kernels.swiglu(hidden)
    gate, linear = hidden.float().chunk(2, -1)
    return (functional.silu(gate) * linear).to(hidden.dtype)


@_swiglu.register_fake
def _(hidden: Tensor) -> Tensor:
    return hidden.new_empty(*hidden.shape[:-1], hidden.size(-1) // 2)


@torch.library.custom_op(
    "train_entry::swiglu_backward", mutates_args=(), schema="(Tensor gradient, Tensor hidden) -> Tensor"
)
def _swiglu_backward(gradient: Tensor, hidden: Tensor) -> Tensor:
    # one pass: the compiler would compute the gradient of each half once for either
    if hidden.is_cuda:
        from train_entry.model import kernels

        return kernels.swiglu_backward(gradient, hidden)
    gate, linear = hidden.float().chunk(2, -1)
    share, wide = gate.sigmoid(), gradient.float()
    of_gate = wide * linear * share * (1 + gate * (1 - share))
    return torch.cat((of_gate, wide * gate * share), -1).to(hidden.dtype)


@_swiglu_backward.register_fake
def _(gradient: Tensor, hidden: Tensor) -> Tensor:
    return hidden.new_empty(hidden.shape)


_swiglu.register_autograd(
    lambda ctx, gradient: _swiglu_backward(gradient, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def swiglu(hidden: Tensor) -> Tensor:
    """Return the first half of the last dimension through SiLU, times the second, computed in fp32."""
    product: Tensor = _swiglu(hidden)  # Megatron's specs take functions, not any callable
    return product
