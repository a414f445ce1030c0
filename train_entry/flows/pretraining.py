"""Pretraining: each token is predicted from all those before it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from train_entry.config.schema import Config
from train_entry.flows.base import Batch, Loss, masked_loss


class Pretraining:
    """Next-token prediction, over the tokens that `loss_mask` selects."""

    def __init__(self, config: Config) -> None:
        pass

    def forward(self, model: Any, batch: Batch) -> Tensor:
        """Return the losses of the tokens. No mask: attention is causal anyway, and can use its fastest kernel."""
        losses: Tensor = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
        return losses

    def loss(self, output: Tensor, batch: Batch) -> Loss:
        """Return the sum of the losses."""
        return masked_loss(output, batch)
