"""The state of training that a checkpoint keeps: the model, its optimizer, the schedule, and their progress."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class TrainState:
    """State of a run on this rank.

    `args`: Megatron-LM's arguments of the model and the run, as checkpoints store them. `model`: the (virtual) stages
    of this rank, each in its data-parallel wrapper. `consumed_samples` is the position in the training data.
    `num_floating_point_operations` is Megatron-LM's count, since the first step.
    """

    args: dict[str, Any]
    model: list[Any]
    optimizer: Any
    scheduler: Any
    iteration: int = 0
    consumed_samples: int = 0
    num_floating_point_operations: int = 0
