"""Fine-tuning: the loss covers completions only, and examples that share a sequence do not attend to each other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from train_entry.config.schema import Config
from train_entry.flows.base import Batch, Loss, masked_loss


class FineTuning:
    """Next-token prediction over completions. A batch with `segment_ids` has several examples in a sequence."""

    def __init__(self, config: Config) -> None:
        pass

    def forward(self, model: Any, batch: Batch) -> Tensor:
        """Return the losses of the tokens."""
        segments = batch.get("segment_ids")
        mask = None if segments is None else segment_mask(segments)
        losses: Tensor = model(batch["tokens"], batch["position_ids"], mask, labels=batch["labels"])
        return losses

    def loss(self, output: Tensor, batch: Batch) -> Loss:
        """Return the sum of the losses of the completions' tokens."""
        return masked_loss(output, batch)


def segment_mask(segment_ids: Tensor) -> Tensor:
    """Return Megatron's attention mask: `[samples, 1, seq, seq]`, True where column is hidden from row.

    A token attends to itself and to the tokens before it in its own segment: `segment_ids` `[samples, seq]`.
    """
    elsewhere = segment_ids[:, :, None] != segment_ids[:, None, :]
    length = segment_ids.shape[1]
    later = torch.ones(length, length, dtype=torch.bool, device=segment_ids.device).triu(1)
    return (elsewhere | later)[:, None]
