"""Proof, at the first step of a run, that the loss of a flow is the same at this layout as on one rank.

The loss is computed from random outputs in place of the model's, which at a first step may be too uniform: once as a
whole, and once in the parts that the ranks and microbatches have. Quotients of total and count, metrics and gradients
must agree.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_convert.errors import ConfigError
from train_entry.flows.base import Batch, Flow, rows_per_sample
from train_entry.flows.sequence import whole_sequences

TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}  # relative, for quotients
LOW_PRECISION = 3e-2
SEED = 20
HINT = (
    "`rows_per_sample` of the class says how many rows belong together, `train_entry.flows.sum_over_sequence` adds up "
    "token values over whole sequences; totals and counts are sums, never means (train_entry/flows/base.py)"
)


@dataclass(frozen=True)
class Sums:
    """Sums of a flow for an output: total, count and metrics, and the gradient of the total by the output."""

    names: tuple[str, ...]
    values: Tensor  # in the order of the names
    gradient: Tensor

    def quotients(self) -> Tensor:
        """Return all values except the count, divided by the count."""
        return self.values[[n for n, name in enumerate(self.names) if name != "count"]] / self.count

    @property
    def count(self) -> Tensor:
        return self.values[self.names.index("count")]


class LossProof:
    """Proof for a run on one rank of the last pipeline stage. `problems` are lines; empty while none is known.

    Args:
        samples_apart: whether a global batch is split over microbatches or data-parallel ranks.
        context: the context-parallel ranks; None if each has whole sequences.
    """

    def __init__(self, flow: Flow, *, samples_apart: bool, context: dist.ProcessGroup | None) -> None:
        self.problems: list[str] = []
        self._flow, self._samples_apart, self._context = flow, samples_apart, context
        self._done = not getattr(flow, "check_layouts", True) or not (samples_apart or context)

    def __call__(self, output: Tensor, batch: Batch) -> None:
        """Check the flow at the shapes of this output and batch, unless that was done, or no token counts here."""
        if self._done:
            return
        rows, length = next(iter(batch.values())).shape[:2]
        if output.ndim == 0 or len(output) != rows or (self._context and output.shape[1:2] != (length,)):
            self._done = True
            self.problems.append(
                f"`forward` returns {list(output.shape)} where a batch is {[rows, length]}: it has to return a value, "
                "or several, for each token, as the model does; sums are for `loss`"
            )
            return
        each = rows_per_sample(self._flow)
        chosen = torch.arange(2 * each, device=output.device) % (2 * each if rows >= 2 * each else each)
        taken = {name: value[chosen] if value.shape[:1] == (rows,) else value for name, value in batch.items()}
        generator = torch.Generator(output.device).manual_seed(SEED)
        over = self._context.size() if self._context else 1
        shape = (2 * each, length * over, *output.shape[2:]) if output.ndim > 1 else (2 * each,)
        made_up = 2 * torch.rand(shape, generator=generator, device=output.device).to(output.dtype)
        wholes = (
            taken if self._context is None else {name: self._joined(value, length) for name, value in taken.items()}
        )
        with whole_sequences():
            try:
                whole = self._sums(made_up, wholes)
            except Exception as error:  # of the user's flow, for other rows than those of a microbatch
                self._done = True
                self.problems.append(f"its loss cannot be computed of {2 * each} rows: {_reason(error)}")
                return
            if not bool(whole.count > 0):
                return
            self._done = True
            if self._samples_apart:
                samples = range(0, 2 * each, each)
                self._compare(
                    whole,
                    lambda: _added([self._sums(made_up[at : at + each], _rows(wholes, at, each)) for at in samples]),
                    f"samples of {each} row{'s' * (each > 1)}, one by one",
                )
        if self._context is not None and not self.problems:
            mine = self._cut(made_up)
            self._compare(
                whole,
                lambda: self._over_ranks(self._sums(mine, taken), length),
                "the parts that context parallelism has",
            )

    def _sums(self, output: Tensor, batch: Batch) -> Sums:
        """Compute a flow's sums for an output. The flow itself stays unchanged, unless it changes tensors in place."""
        leaf = output.detach().clone().requires_grad_(output.is_floating_point())
        with torch.enable_grad():
            loss = copy.copy(self._flow).loss(leaf, dict(batch))
            gradient = torch.autograd.grad(loss.total, leaf, allow_unused=True)[0] if loss.total.requires_grad else None
        named = {"total": loss.total, "count": loss.count, **loss.metrics}
        values = torch.stack([value.detach().to(output.device, torch.float32) for value in named.values()])
        return Sums(tuple(named), values, torch.zeros_like(leaf) if gradient is None else gradient)

    def _compare(self, whole: Sums, compute: Callable[[], Sums], parts: str) -> None:
        try:
            computed = compute()
        except Exception as error:  # of the user's flow, for rows that it does not expect
            self.problems.append(f"its loss cannot be computed of {parts}: {_reason(error)}")
            return
        tolerance = TOLERANCE.get(whole.gradient.dtype, LOW_PRECISION)
        names = [name for name in whole.names if name != "count"]
        for name, expected, value in zip(names, whole.quotients().tolist(), computed.quotients().tolist(), strict=True):
            if not abs(value - expected) <= tolerance * max(abs(expected), abs(value), 1e-6):
                what = "its loss" if name == "total" else f"its metric `{name}`"
                self.problems.append(f"{what} of made-up outputs is {expected:.6g} as a whole, {value:.6g} of {parts}")
        if self.problems:
            return
        expected, value = whole.gradient / whole.count, computed.gradient / computed.count
        if not (value - expected).float().norm() <= tolerance * expected.float().norm() + 1e-12:
            self.problems.append(f"the gradient of its loss as a whole is another than that of {parts}")

    def _over_ranks(self, part: Sums, length: int) -> Sums:
        """Return the sum over the context-parallel ranks; gradients become those of whole sequences."""
        values = part.values.clone()
        dist.all_reduce(values, group=self._context)
        return Sums(part.names, values, self._joined(part.gradient, length))

    def _cut(self, whole: Tensor) -> Tensor:
        """Return this rank's part of each sequence."""
        from megatron.core.utils import get_batch_on_this_cp_rank

        cut: Tensor = get_batch_on_this_cp_rank({"output": whole}, self._context)["output"]
        return cut

    def _joined(self, part: Tensor, length: int) -> Tensor:
        """Return whole sequences from the parts of all ranks, an early and a late chunk each; others unchanged."""
        if self._context is None or part.shape[1:2] != (length,):
            return part
        parts = [torch.empty_like(part) for _ in range(self._context.size())]
        dist.all_gather(parts, part.contiguous(), group=self._context)
        chunks = [each.chunk(2, dim=1) for each in parts]
        return torch.cat([*(early for early, _ in chunks), *(late for _, late in reversed(chunks))], dim=1)


def refuse(flow: Flow, problems: Sequence[str]) -> None:
    """Refuse a flow whose loss depends on the layout.

    Raises:
        ConfigError: there are problems.
    """
    if problems:
        name = type(flow).__qualname__
        raise ConfigError(f"the loss of the flow `{name}` is another one at this layout", items=problems, hint=HINT)


def _rows(batch: Batch, start: int, count: int) -> Batch:
    """Return some rows of a batch; entries without rows are unchanged."""
    rows = next(iter(batch.values())).shape[:1]
    return {name: each[start : start + count] if each.shape[:1] == rows else each for name, each in batch.items()}


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _added(parts: Sequence[Sums]) -> Sums:
    values = torch.stack([each.values for each in parts]).sum(0)
    return Sums(parts[0].names, values, torch.cat([each.gradient for each in parts]))
