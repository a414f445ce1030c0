"""Curves of a few steps: of a run here, and of a model in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.train.test_train_layouts import WEIGHT_DECAY, batch_of
from train_entry.config.schema import Config
from train_entry.trainer import Trainer

STEPS, LAST = 3, 100  # the number of the batch that is evaluated at the end

Curve = list[list[float]]


def by_trainer(config: Config, names: Sequence[str]) -> Curve:
    """Loss, norm of the gradients and metrics of these names of each step, and the loss of another batch at the end."""
    with Trainer(config) as trainer:
        trainer.initialize()
        trainer.setup_model_and_optimizer()
        vocab_size = trainer.args["vocab_size"]
        steps = []
        for number in range(STEPS):
            metrics = trainer.train(batch_of(number, vocab_size))
            steps.append([float(each) for each in (metrics.loss, metrics.grad_norm or 0)])
            steps[-1] += [float(metrics.extra[name]) for name in names]
        return [*steps, [trainer.evaluate([batch_of(LAST, vocab_size)])]]


def by_torch(model: Any, loss_of: Callable[[dict[str, Tensor]], Sequence[Tensor]], lr: float) -> Curve:
    """Return the same of a model of transformers, by AdamW at a constant rate.

    Args:
        loss_of: the loss of a batch, and what else is kept of it.
    """
    parameters, vocab_size = list(model.parameters()), model.config.vocab_size
    groups = [
        {"params": [each for each in parameters if each.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [each for each in parameters if each.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8)
    steps = []
    for number in range(STEPS):
        loss, *others = loss_of(batch_of(number, vocab_size))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        steps.append([each.item() for each in (loss, norm, *others)])
    with torch.no_grad():
        return [*steps, [loss_of(batch_of(LAST, vocab_size))[0].item()]]
