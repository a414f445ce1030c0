"""The cross entropy of each token from logits that stay as the output layer made them: no fp32 copy of them exists."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Logits that are computed on in fp32 at once: 1 GiB where nothing is compiled, and rows enough to fill a GPU.
CHUNK = 2**28

Kernel = Callable[..., Any]


def vocab_parallel_cross_entropy(
    logits: Tensor, labels: Tensor, group: dist.ProcessGroup | None = None, *, vocab_size: int | None = None
) -> Tensor:
    """Minus the logarithm of the probability of each label, in fp32, as Megatron's function of this name.

    Megatron's makes the fp32 probabilities of all tokens and keeps them: with a vocabulary of 128,256 half a megabyte a
    token, and as much again on the way back. This one keeps the logits themselves, computes in fp32 a chunk of tokens
    at a time, and writes the gradient over the logits: memory for nothing else, and no second product with the weight.
    So a backward pass can be made once only.

    Args:
        logits: `[..., rows]`, of this rank's rows of the vocabulary.
        labels: `[...]`, of the whole vocabulary.
        group: the tensor-parallel ranks that share the vocabulary.
        vocab_size: the vocabulary without padding. Rows beyond it have no probability; unless given all have, as
            everywhere in Megatron: there a model that comes from elsewhere, whose padding is zero, gives most of its
            probability to the padding, where its other logits are well below zero, as GPT-2's are.
    """
    losses: Tensor = _CrossEntropy.apply(logits, labels, group, vocab_size, False)
    return losses


@functools.cache
def model_class(compiled: bool, vocab_size: int | None = None) -> type:
    """Megatron's `GPTModel` with this cross entropy; `compiled`: each of its two passes is one kernel."""
    from megatron.core.models.gpt import GPTModel

    class Model(GPTModel):
        """A `GPTModel` whose loss needs no memory beside the logits."""

        def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
            """Losses of `[samples, tokens]`, from labels of that shape and logits of `[tokens, samples, rows]`."""
            group = self.pg_collection.tp
            losses: Tensor = _CrossEntropy.apply(logits, labels.t().contiguous(), group, vocab_size, compiled)
            return losses.t().contiguous()

    return Model


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        group: dist.ProcessGroup | None,
        vocab_size: int | None,
        compiled: bool,
    ) -> Tensor:
        rows = logits.size(-1)
        ranks, rank = (group.size(), group.rank()) if group is not None else (1, 0)
        places = labels.view(-1) - rank * rows
        ctx.words = rows if vocab_size is None else max(0, min(rows, vocab_size - rank * rows))
        flat = logits.view(-1, rows)[:, : ctx.words]
        if ctx.words:
            stats = torch.cat([_kernel(_statistics, compiled)(*each) for each in _chunks(flat, places)], 1)
        else:  # nothing but padding: no probability
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
        ctx.compiled, ctx.spent = compiled, False
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
            for each in _chunks(flat[:, : ctx.words], places, normaliser, gradient.reshape(-1)):
                _kernel(_overwrite, ctx.compiled)(*each)
        return flat.view(logits.shape), None, None, None, None


def _chunks(flat: Tensor, *others: Tensor) -> list[tuple[Tensor, ...]]:
    """The rows of all of these, in equal parts as far as may be, so that few shapes are compiled."""
    parts = -(-flat.numel() // CHUNK)
    return list(zip(*(each.tensor_split(max(1, parts)) for each in (flat, *others)), strict=True))


def _statistics(logits: Tensor, places: Tensor) -> Tensor:
    """Of each row: the largest logit, the sum of exponentials relative to it, and the logit of the label, or 0."""
    wide = logits.float()
    largest = wide.amax(1)
    total = (wide - largest[:, None]).exp().sum(1)
    here = (places >= 0) & (places < logits.size(1))
    chosen = wide.gather(1, places.clamp(0, logits.size(1) - 1)[:, None])[:, 0]
    return torch.stack((largest, total, torch.where(here, chosen, 0.0)))


def _overwrite(logits: Tensor, places: Tensor, normaliser: Tensor, gradient: Tensor) -> None:
    """Put the gradient in the place of the logits."""
    probabilities = (logits.float() - normaliser[:, None]).exp()
    label = torch.arange(logits.size(1), device=logits.device) == places[:, None]
    logits.copy_((probabilities - label.float()) * gradient[:, None])


@functools.cache
def _kernel(function: Kernel, compiled: bool) -> Kernel:
    return torch.compile(function) if compiled else function
