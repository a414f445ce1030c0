"""The interface of a training algorithm: how a batch passes through the model, and what its loss is.

To add one, write a class with these three methods and name it: `training.flow=my_module:MyFlow`. It need not
derive from anything. Optional attributes:

`rows_per_sample`: the number of adjacent rows of a batch that belong together, as the chosen and the rejected answer of
a pair; 1 unless given. They are never separated, by microbatches, data-parallel ranks or readers.
`counts_samples`: True where `Loss.count` counts samples, False where it counts tokens; with several rows per sample it
is True unless given. Balancing losses of experts are weighted by it.
`reference`: True adds the output of `forward` with a frozen model, of the weights in `checkpoint.init`, to the batch
as `reference`, for `loss`.
`Options`: a pydantic model of its options in the configuration, as `training.flow.beta=0.1`; the flow is then made
as `MyFlow(config, options)`.
`check_layouts`: False omits the proof, at the first step, that its loss is the same at this layout as on one rank;
for a random loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from train_entry.config.schema import Config

# One microbatch by names, each tensor `[samples, seq_length]`: tokens, labels, position_ids (int64), loss_mask
# (float32), and others that the data set has.
Batch = dict[str, Tensor]

REFERENCE = "reference"  # attribute of a flow with a frozen model, and key of the model's output in a batch


@dataclass(frozen=True)
class Loss:
    """Loss of a microbatch on this rank, as sums, so that it is the same at any layout.

    The trainer divides the gradients, and the reported metrics, by the count over the whole global batch: both are
    independent of the numbers of microbatches and ranks.

    `total`: the sum of the losses of tokens or of samples, a scalar for the backward pass.
    `count`: the number of tokens or samples in that sum, a scalar.
    `metrics`: further sums over the same; the run reports each divided by the count. The names are the same at every
    step.

    For tokens: each context-parallel rank sums its own. For samples: `train_entry.flows.sum_over_sequence` gives each
    of these ranks the sums over whole sequences, and each computes the same total and count from them. One loss cannot
    mix both; a part of it over tokens must use `sum_over_sequence`, too.
    """

    total: Tensor
    count: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


class Flow(Protocol):
    """Training algorithm. One object of it serves a run, on every rank.

    The trainer handles the layout around it: each data-parallel rank gets its samples; a batch is on the
    device already; under context parallelism each tensor is cut along its second dimension, to this rank's part of the
    sequence; Megatron's schedule calls `forward` on each pipeline stage, and runs the backward pass. Entries that
    `forward` adds to the batch are available to `loss`.
    """

    def __init__(self, config: Config) -> None: ...

    def forward(self, model: Any, batch: Batch) -> Tensor:
        """Call this rank's stage of the model, once. The last stage's result is passed to `loss`.

        Args:
            model: Megatron Core's `GPTModel`, or one stage of it, in its data-parallel wrapper. With `labels` its last
                stage returns the losses of the tokens `[samples, seq_length]`, without them logits
                `[samples, seq_length, vocabulary / tp]`; other stages return the input of the next one.
        """
        ...

    def loss(self, output: Tensor, batch: Batch) -> Loss:
        """Return the loss for the last stage's result on this batch. At the first step, the proof calls it as well."""
        ...


def rows_per_sample(flow: Flow) -> int:
    """Return the number of adjacent rows of a batch that belong together in a flow."""
    rows: int = getattr(flow, "rows_per_sample", 1)
    return rows


def count_unit(flow: Flow, length: int) -> int:
    """Return the tokens, of `length` on this rank, per unit of a flow's count: all those of a sample, or one."""
    rows = rows_per_sample(flow)
    return rows * length if getattr(flow, "counts_samples", rows > 1) else 1


def needs_reference(flow: Flow) -> bool:
    """Return whether a flow compares with a frozen reference model."""
    return bool(getattr(flow, REFERENCE, False))


def masked_loss(token_losses: Tensor, batch: Batch) -> Loss:
    """Return the loss over the tokens that `loss_mask` selects, in fp32."""
    mask = batch["loss_mask"]
    return Loss((token_losses.float() * mask).sum(), mask.sum())
