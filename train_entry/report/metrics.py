"""The metrics of a step, of the steps between two lines, and of an evaluation."""

from __future__ import annotations

import math
import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from mcore_convert.errors import ranged
from train_entry.report.flops import mfu


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of a step, over all ranks.

    A number may be a tensor on the device, which is read only when it is shown. `iteration` includes this step: the
    first is 1. `loss` is per token, before the step; `grad_norm` before clipping. `num_tokens` passed through the
    model, whether or not they count in the loss. `seconds` is the time of the step, without saving and evaluation.
    `skipped`: the weights did not change, since gradients in fp16 overflowed.
    """

    iteration: int
    loss: float | Tensor
    grad_norm: float | Tensor | None
    lr: float
    num_tokens: int
    num_samples: int
    seconds: float
    skipped: bool = False
    loss_scale: float | Tensor | None = None
    extra: Mapping[str, float | Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """Step whose numbers are known on the host."""

    iteration: int
    loss: float
    grad_norm: float | None
    lr: float
    num_tokens: int
    num_samples: int
    seconds: float
    skipped: bool
    loss_scale: float | None
    extra: Mapping[str, float]

    @staticmethod
    def of(metrics: StepMetrics) -> Step:
        """Return the step with its numbers; waits until the device has computed them."""
        return Step(**{each.name: _on_host(getattr(metrics, each.name)) for each in fields(Step)})


def _on_host(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _on_host(each) for name, each in value.items()}
    return value.item() if isinstance(value, Tensor) else value


@dataclass(frozen=True)
class Evaluation:
    """Loss per token of a data set, say `valid`, after step `iteration`. `seconds` is the time of the evaluation."""

    iteration: int
    name: str
    loss: float
    num_tokens: int | None = None
    seconds: float | None = None
    extra: Mapping[str, float] = field(default_factory=dict)

    @property
    def perplexity(self) -> float:
        """exp(loss), or infinity if that is too large for a float."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


@dataclass(frozen=True)
class Speed:
    """Speed of some steps. Tokens are those of all ranks; `tflops` and `mfu` are per device."""

    tokens_per_second: float
    tflops: float
    mfu: float | None


@dataclass(frozen=True)
class Rates:
    """Factors from seconds to speeds: the operations per token, the devices, and the peak of one if known."""

    flops_per_token: int
    num_devices: int
    peak_tflops: float | None

    def speed(self, num_tokens: int, seconds: float) -> Speed:
        """Return the speed of a step or of several."""
        per_second = num_tokens / max(seconds, 1e-9)
        tflops = self.flops_per_token * per_second / self.num_devices / 1e12
        return Speed(per_second, tflops, mfu(tflops, self.peak_tflops))


@dataclass(frozen=True)
class Interval:
    """Steps since the last line, including the newest.

    `lr`, `grad_norm` and `loss_scale` are those of the newest, and so is `loss`, unless it was skipped. `phases` are
    seconds in the whole interval, `memory` the peak so far in bytes, `eta` seconds until the last step.
    """

    steps: Sequence[Step]
    speed: Speed
    memory: Mapping[str, int]
    phases: Mapping[str, float]
    eta: float | None

    @property
    def newest(self) -> Step:
        """Last step of the interval."""
        return self.steps[-1]

    @property
    def seconds(self) -> float:
        """Seconds of all its steps."""
        return sum(step.seconds for step in self.steps)

    @property
    def loss(self) -> float:
        """Loss of the newest step that was not skipped; NaN if all were.

        The same number as in `metrics.jsonl`, in a model card and beside the plot: a mean over steps would differ.
        """
        return next((step.loss for step in reversed(self.steps) if not step.skipped), math.nan)


def memory_of(device: torch.device) -> dict[str, int]:
    """Return this process's peak memory in bytes: on a GPU of tensors, and reserved for them; else of all memory."""
    if device.type == "cuda":
        return {
            "allocated": torch.cuda.max_memory_allocated(device),
            "reserved": torch.cuda.max_memory_reserved(device),
        }
    unit = 1 if sys.platform == "darwin" else 1024
    return {"resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}


def warnings_of(steps: Sequence[Step]) -> list[str]:
    """Return warnings about these steps: those that were skipped, and those whose loss is not finite."""
    lines = []
    skipped = [step.iteration for step in steps if step.skipped]
    if skipped:
        scale = steps[-1].loss_scale
        then = "" if scale is None else f"; the loss scale is now {scale:g}"
        lines.append(f"{_steps(skipped)} skipped: the gradients overflowed, the weights did not change{then}")
    for wrong in ("nan", "inf", "-inf"):
        where = [step.iteration for step in steps if not step.skipped and str(step.loss) == wrong]
        if where:
            lines.append(f"the loss is {wrong} at {_steps(where)}")
    norms = [s.iteration for s in steps if not s.skipped and math.isfinite(s.loss) and not _is_finite(s.grad_norm)]
    if norms:
        lines.append(f"the norm of the gradients is not finite at {_steps(norms)}")
    return lines


def is_bad(step: StepMetrics) -> bool:
    """Return whether the numbers on the host call for a warning; those on the device are not waited for."""
    numbers = [number for number in (step.loss, step.grad_norm) if isinstance(number, float)]
    return step.skipped or not all(map(math.isfinite, numbers))


def _is_finite(number: float | None) -> bool:
    return number is None or math.isfinite(number)


def _steps(iterations: Sequence[int]) -> str:
    """Return steps in words: `step 3`, `steps 3-5, 9`."""
    return f"{'step' if len(iterations) == 1 else 'steps'} {ranged(iterations)}"
