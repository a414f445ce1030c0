"""Megatron's `GPTModel` with this project's loss, and with rotary positions in the form that compiled layers need."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from train_entry.model.loss import vocab_parallel_cross_entropy


@functools.cache
def model_class(vocab_size: int, *, fused_loss: bool = False, rotary_tables: bool = False) -> type:
    """Return a class derived from `GPTModel`, with the same parameters.

    Args:
        vocab_size: size without padding.
        fused_loss: use kernels for GPUs.
        rotary_tables: pass cosines and sines, `[2, tokens, 1, 1, channels]` in fp32, to layers instead of angles.
    """
    from megatron.core.models.gpt import GPTModel

    class Model(GPTModel):
        """`GPTModel` whose loss needs no memory beside the logits."""

        def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
            """Return the losses `[samples, tokens]`, from labels of that shape and logits `[tokens, samples, rows]`."""
            losses = vocab_parallel_cross_entropy(
                logits, labels.t().contiguous(), self.pg_collection.tp, vocab_size=vocab_size, fused=fused_loss
            )
            return losses.t().contiguous()

        def _preprocess(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
            hidden, angles, *others = super()._preprocess(*args, **kwargs)
            if rotary_tables and angles is not None:
                angles = torch.stack((angles.cos(), angles.sin()))
            return hidden, angles, *others

    return Model
