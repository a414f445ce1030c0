"""The interface of a training algorithm: how a batch goes through the model, and what its loss is.

To bring your own, write a class with these three methods and name it: `training.flow=my_module:MyFlow`. It need not
derive from anything. Attributes may say more of it:

`rows_per_sample`: how many adjacent rows of a batch belong together, as the chosen and the rejected answer of a pair; 1
unless given. They are never torn apart, by microbatches, data-parallel ranks or readers.
`counts_samples`: True where `Loss.count` is of samples, False where it is of tokens; with several rows to a sample it
is True unless given. Balancing losses of experts are weighed by it.
`reference`: True puts the output of `forward` with a frozen model, of the weights in `checkpoint.init`, into the batch
as `reference`, for `loss`.
`Options`: a pydantic model of what the configuration may say of it, as `training.flow.beta=0.1`; the flow is then made
as `MyFlow(config, options)`.
`check_layouts`: False leaves out the proof, at the first step, that its loss is the same at this layout as on one rank;
for a loss that is random.
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

REFERENCE = "reference"  # the attribute of a flow that compares with a frozen model, and where in a batch its output is


@dataclass(frozen=True)
class Loss:
    """The loss of a microbatch on this rank, as sums, so that it is the same at any layout.

    The trainer divides the gradients, and what it reports, by the count over the whole global batch: neither the number
    of microbatches nor that of ranks changes either.

    `total`: the sum of the losses, of tokens or of samples, a scalar to go backward from.
    `count`: how many tokens or samples that sum is over, a scalar.
    `metrics`: further sums over the same; the run reports each divided by the count. The names are the same at every
    step.

    Of tokens: each context-parallel rank sums its own. Of samples: `train_entry.flows.sum_over_sequence` gives each of
    these ranks the sums over whole sequences, and each makes the same total and count of them. Not both in one loss;
    a part of it that is of tokens goes through `sum_over_sequence`, too.
    """

    total: Tensor
    count: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


class Flow(Protocol):
    """A training algorithm. One object of it serves a run, on every rank.

    Around it the trainer does what depends on the layout: each data-parallel rank gets its samples; a batch is on the
    device already; under context parallelism each tensor is cut along its second dimension, to this rank's part of the
    sequence; Megatron's schedule calls `forward` on each pipeline stage, and goes backward. What `forward` adds to the
    batch, `loss` finds there.
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
        """Return the loss of what the last stage returned for this batch. At the first step,
        the proof calls it as well.
        """
        ...


def rows_per_sample(flow: Flow) -> int:
    """Return how many adjacent rows of a batch belong together in a flow."""
    rows: int = getattr(flow, "rows_per_sample", 1)
    return rows


def count_unit(flow: Flow, length: int) -> int:
    """Return how many tokens of `length` on this rank one of a flow's count stands for: all of a sample, or itself."""
    rows = rows_per_sample(flow)
    return rows * length if getattr(flow, "counts_samples", rows > 1) else 1


def needs_reference(flow: Flow) -> bool:
    """Return whether a flow compares with a frozen reference model."""
    return bool(getattr(flow, REFERENCE, False))


def masked_loss(token_losses: Tensor, batch: Batch) -> Loss:
    """Return the loss over the tokens that `loss_mask` selects, in fp32."""
    mask = batch["loss_mask"]
    return Loss((token_losses.float() * mask).sum(), mask.sum())
