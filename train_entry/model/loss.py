"""The cross entropy of each token, from the logits as the output layer made them: without an fp32 copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK = 2**28  # logits per fp32 computation, outside of kernels: 1 GiB


def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    vocab_size: int | None = None,
    fused: bool = False,
) -> Tensor:
    """Return the negative log-probability of each label, in fp32, as Megatron's function of this name.

    Megatron's function computes the fp32 probabilities of all tokens and keeps them: with a vocabulary of 128,256 half
    a megabyte per token, and as much again in the backward pass. This one keeps the logits themselves, computes in fp32
    for a chunk of tokens at a time, and writes the gradient over the logits: no further memory, and no second product
    with the weight. So only one backward pass is possible.

    Args:
        logits: `[..., rows]`, for this rank's rows of the vocabulary.
        labels: `[...]`, for the whole vocabulary.
        group: the tensor-parallel ranks that share the vocabulary.
        vocab_size: the vocabulary without padding. Rows beyond it get no probability; unless given all rows do, as
            everywhere in Megatron: there a foreign model, whose padding is zero, gives most of its
            probability to the padding if its other logits are well below zero, as GPT-2's are.
        fused: use Triton's kernels, which read the logits once in each pass, on a GPU.
    """
    losses: Tensor = _CrossEntropy.apply(logits, labels, group, vocab_size, fused)
    return losses


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        group: dist.ProcessGroup | None,
        vocab_size: int | None,
        fused: bool,
    ) -> Tensor:
        rows = logits.size(-1)
        ranks, rank = (group.size(), group.rank()) if group is not None else (1, 0)
        places = labels.view(-1) - rank * rows
        ctx.words = rows if vocab_size is None else max(0, min(rows, vocab_size - rank * rows))
        flat = logits.view(-1, rows)[:, : ctx.words]
        if ctx.words:
            stats = _passes(fused)[0](flat, places)
        else:  # only padding: no probability
            stats = torch.zeros(3, len(flat), device=logits.device)
            stats[0] = torch.finfo(torch.float32).min
        largest, total, chosen = stats.unbind()
        if ranks > 1:
            overall = largest.clone()
            dist.all_reduce(overall, op=dist.ReduceOp.MAX, group=group)
            sums = torch.stack((total * (largest - overall).exp(), chosen))
            dist.all_reduce(sums, group=group)
            largest, (total, chosen) = overall, sums.unbind()
        normaliser = largest + total.log()
        ctx.save_for_backward(logits, places, normaliser)
        ctx.fused, ctx.spent = fused, False
        return (normaliser - chosen).view(labels.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        if ctx.spent:
            raise RuntimeError("the logits of this loss are overwritten with their gradient: backward runs once")
        ctx.spent = True
        logits, places, normaliser = ctx.saved_tensors
        flat = logits.detach().view(-1, logits.size(-1))
        flat[:, ctx.words :].zero_()
        if ctx.words:
            _passes(ctx.fused)[1](flat[:, : ctx.words], places, normaliser, gradient.reshape(-1))
        return flat.view(logits.shape), None, None, None, None


def _passes(fused: bool) -> tuple[Callable[[Tensor, Tensor], Tensor], Callable[..., None]]:
    """Return the function that reads the logits in the forward pass, and the one that overwrites them backward."""
    if not fused:
        return _statistics, _overwrite
    from train_entry.model import kernels  # with Triton, which needs CUDA

    return kernels.statistics, kernels.overwrite


def _statistics(logits: Tensor, places: Tensor) -> Tensor:
    """Return for each row the largest logit, the sum of exponentials relative to it, and the label's logit, or 0."""
    here = (places >= 0) & (places < logits.size(1))
    labels = places.clamp(0, logits.size(1) - 1)[:, None]
    chosen = torch.where(here, logits.gather(1, labels)[:, 0].float(), 0.0)
    parts = []
    for (part,) in _chunks(logits):
        largest = part.amax(1).float()
        parts.append(torch.stack((largest, (part.float() - largest[:, None]).exp_().sum(1))))
    return torch.cat((torch.cat(parts, 1), chosen[None]))


def _overwrite(logits: Tensor, places: Tensor, normaliser: Tensor, gradient: Tensor) -> None:
    """Overwrite the logits with the gradient."""
    for part, place, log_total, scale in _chunks(logits, places, normaliser, gradient):
        probabilities = (part.float() - log_total[:, None]).exp_()
        here = ((place >= 0) & (place < part.size(1))).float()
        probabilities.scatter_add_(1, place.clamp(0, part.size(1) - 1)[:, None], -here[:, None])
        part.copy_(probabilities.mul_(scale[:, None]))


def _chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Return the rows of all these tensors in parts, with at most `CHUNK` logits, or one row."""
    tokens = max(1, CHUNK // tensors[0].size(1))
    return zip(*(each.split(tokens) for each in tensors), strict=True)
