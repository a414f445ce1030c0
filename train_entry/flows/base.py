"""What a training algorithm is to the trainer: how a batch goes through the model, and what its loss is.

To bring your own, write a class with these three methods and name it: `training.flow=my_module:MyFlow`. It need not
derive from anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from train_entry.config.schema import Config

# One microbatch by names, each tensor `[samples, seq_length]`: tokens, labels, position_ids (int64), loss_mask
# (float32), and whatever else the data set gives.
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Loss:
    """The loss of a microbatch on this rank, as sums, so that it is the same at any layout.

    The trainer divides the gradients, and what it reports, by the count over the whole global batch: neither the number
    of microbatches nor that of ranks changes either.

    `total`: the sum of the token losses, a scalar to go backward from.
    `count`: how many tokens that sum is over, a scalar.
    `metrics`: further sums over the same tokens; the run reports each divided by the count. The names are the same at
    every step.
    """

    total: Tensor
    count: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


class Flow(Protocol):
    """A training algorithm. One object of it serves a run, on every rank.

    Around it the trainer does what depends on the layout: each data-parallel rank gets its samples; a batch is on the
    device already; under context parallelism each tensor is cut along its second dimension, to this rank's part of the
    sequence; Megatron's schedule calls `forward` on each pipeline stage, and goes backward.
    """

    def __init__(self, config: Config) -> None: ...

    def forward(self, model: Any, batch: Batch) -> Tensor:
        """Call this rank's stage of the model, once. What the last stage returns goes to `loss`.

        Args:
            model: Megatron Core's `GPTModel`, or one stage of it, in its data-parallel wrapper. With `labels` its last
                stage returns the losses of the tokens `[samples, seq_length]`, without them logits
                `[samples, seq_length, vocabulary / tp]`; other stages return what they hand on.
        """
        ...

    def loss(self, output: Tensor, batch: Batch) -> Loss:
        """The loss of what the last stage returned for this batch."""
        ...


def masked_loss(token_losses: Tensor, batch: Batch) -> Loss:
    """The loss over the tokens that `loss_mask` selects, in fp32."""
    mask = batch["loss_mask"]
    return Loss((token_losses.float() * mask).sum(), mask.sum())
