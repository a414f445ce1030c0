"""A global batch forward and backward, by Megatron's pipeline schedule, and its sums on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from train_entry.config.schema import Config
from train_entry.flows.base import Batch, Flow
from train_entry.flows.proof import LossProof, refuse
from train_entry.forward_step import Sums, forward_step, own_forward_step, reference_step
from train_entry.initialize import together


class Schedule:
    """Schedule of a model: 1F1B, interleaved with virtual stages, or none without pipeline parallelism."""

    def __init__(
        self,
        config: Config,
        flow: Flow,
        model: Sequence[Any],
        device: torch.device,
        own: Callable[..., Any] | None = None,
        reference: Sequence[Any] = (),
    ) -> None:
        """Prepare the schedule.

        Args:
            reference: the stages of a frozen model, whose output is passed to the loss.
            own: the user's `forward_step` in place of the flow, whose loss is not checked.
        """
        self._own, self._reference = own, list(reference)
        self._training, self._flow, self._model, self._device = config.training, flow, list(model), device
        self._in_tokens = getattr(self._model[0].config, "num_moe_experts", None) is not None
        self._names: list[str] | None = None  # of the sums that the flow reports: the same at each step
        self._proven = False

    def __call__(self, microbatches: Sequence[Batch], *, forward_only: bool) -> dict[str, float]:
        """Run this data-parallel rank's microbatches. Gradients are then averaged over the tokens of all ranks.

        Return sums over the global batch, the same on every rank: `total` of the losses, their `count`, and further
        metrics of the flow.

        Raises:
            ConfigError: at the first backward pass, the loss of the flow depends on this layout; on every rank.
        """
        if self._reference:
            microbatches = self._with_reference(microbatches)
        proof = None if self._proven or forward_only or self._own is not None else self._proof(len(microbatches))
        ours = partial(forward_step, self._flow, proof, self._in_tokens)
        step = ours if self._own is None else partial(own_forward_step, self._own)
        outputs = self._run(step, self._model, microbatches, forward_only=forward_only)
        if proof is not None:
            with together():
                refuse(self._flow, proof.problems)
            self._proven = True
        return self._summed(outputs)

    def _run(
        self, step: Callable[..., Any], model: list[Any], microbatches: Sequence[Batch], *, forward_only: bool
    ) -> list[Sums]:
        """Return the sums of each microbatch on the last stage; an empty list on the others."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        several = len(model) > 1
        outputs: list[Sums] = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter(microbatches) for _ in model] if several else iter(microbatches),
            model=model if several else model[0],
            num_microbatches=len(microbatches),
            seq_length=self._training.seq_length,
            micro_batch_size=self._training.micro_batch_size,
            forward_only=forward_only,
        )
        return outputs

    def _with_reference(self, microbatches: Sequence[Batch]) -> list[Batch]:
        """Return the microbatches with the output of the reference model, on the stage that computes losses."""
        with torch.no_grad():
            step = partial(reference_step, self._flow)
            answers = self._run(step, self._reference, microbatches, forward_only=True)
        outputs: Sequence[Sums] = answers or [{} for _ in microbatches]
        return [{**batch, **output} for batch, output in zip(microbatches, outputs, strict=True)]

    def _proof(self, num_microbatches: int) -> LossProof:
        from megatron.core import parallel_state

        return LossProof(
            self._flow,
            samples_apart=num_microbatches * parallel_state.get_data_parallel_world_size() > 1,
            context=parallel_state.get_context_parallel_group()
            if parallel_state.get_context_parallel_world_size() > 1
            else None,
        )

    def _summed(self, outputs: list[Sums]) -> dict[str, float]:
        """Sum over microbatches, and over data- and context-parallel ranks of the last stage; the same on all ranks."""
        from megatron.core import parallel_state

        stages = parallel_state.get_pipeline_model_parallel_group()
        last = dist.get_process_group_ranks(stages)[-1]
        if self._names is None:
            names = [list(outputs[0]) if outputs else []]
            if stages.size() > 1:
                dist.broadcast_object_list(names, last, group=stages)
            self._names = names[0]
        if outputs:
            sums = torch.stack([torch.stack([each[name].float() for each in outputs]).sum() for name in self._names])
            dist.all_reduce(sums, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        else:
            sums = torch.zeros(len(self._names), device=self._device)
        if stages.size() > 1:
            dist.broadcast(sums, last, group=stages)
        return dict(zip(self._names, sums.tolist(), strict=True))
