"""A loss over pairs of rows, as a flow and in plain torch: what it learns, and flows that do it wrong."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from train_entry.config.schema import Config
from train_entry.flows import Batch, Loss, sum_over_sequence

BETA = 0.1


class Pairs:
    """The first row of each pair is to become more probable than the second; metrics: how often it is, and by what."""

    rows_per_sample = 2

    def __init__(self, config: Config) -> None:
        pass

    def forward(self, model: Any, batch: Batch) -> Tensor:
        losses: Tensor = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
        return losses

    def loss(self, output: Tensor, batch: Batch) -> Loss:
        rows = self.sums(output.float() * batch["loss_mask"])
        margin = BETA * (rows[1::2] - rows[0::2])
        losses = -torch.nn.functional.logsigmoid(margin)
        return Loss(losses.sum(), torch.tensor(len(margin)), {"right": (margin > 0).sum(), "margin": margin.sum()})

    def sums(self, values: Tensor) -> Tensor:
        return sum_over_sequence(values)


class Torn(Pairs):
    """Does not say that rows belong together."""

    rows_per_sample = 1


class PartsOnly(Pairs):
    """Takes a rank's part of a sequence for the whole."""

    def sums(self, values: Tensor) -> Tensor:
        return values.sum(1)


class WithoutGradient(Pairs):
    """Sums over ranks in a way that no gradient goes through."""

    def sums(self, values: Tensor) -> Tensor:
        local = values.sum(1)
        return local + (sum_over_sequence(values) - local).detach()


class Mixed(Pairs):
    """Adds a loss of tokens to one of samples, without a sum over the sequence."""

    def loss(self, output: Tensor, batch: Batch) -> Loss:
        loss = super().loss(output, batch)
        return Loss(loss.total + (output.float() * batch["loss_mask"]).sum(), loss.count)


class Mean(Pairs):
    """A mean of the tokens of a microbatch in the place of sums."""

    rows_per_sample = 1

    def loss(self, output: Tensor, batch: Batch) -> Loss:
        mask = batch["loss_mask"]
        return Loss((output.float() * mask).sum() / mask.sum(), torch.tensor(1))


def loss_of_pairs(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return the same of a model of transformers."""
    logits = model(batch["tokens"]).logits
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none")
    rows = (losses * batch["loss_mask"]).sum(1)
    return -torch.nn.functional.logsigmoid(BETA * (rows[1::2] - rows[0::2])).mean()
