"""A global batch forward and backward, by Megatron's pipeline schedule, and what comes of it on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from train_entry.config.schema import Config
from train_entry.flows.base import Batch, Flow
from train_entry.flows.proof import LossProof, refuse
from train_entry.forward_step import Told, forward_step
from train_entry.initialize import together


class Schedule:
    """The schedule of a model: 1F1B, interleaved with virtual stages, or none without pipeline parallelism."""

    def __init__(self, config: Config, flow: Flow, model: Sequence[Any], device: torch.device) -> None:
        self._training, self._flow, self._model, self._device = config.training, flow, list(model), device
        self._names: list[str] | None = None  # of what the flow reports: the same at each step
        self._proven = False

    def __call__(self, microbatches: Sequence[Batch], *, forward_only: bool) -> dict[str, float]:
        """Run this data-parallel rank's microbatches. Gradients end up averaged over the tokens of all ranks.

        Returns sums over the global batch, the same on every rank: `total` of the losses, their `count`, and what else
        the flow reports.

        Raises:
            ConfigError: at the first backward pass, the loss of the flow is another one at this layout; on every rank.
        """
        from megatron.core.pipeline_parallel import get_forward_backward_func

        several = len(self._model) > 1
        proof = None if self._proven or forward_only else self._proof(len(microbatches))
        told = get_forward_backward_func()(
            forward_step_func=partial(forward_step, self._flow, proof),
            data_iterator=[iter(microbatches) for _ in self._model] if several else iter(microbatches),
            model=self._model if several else self._model[0],
            num_microbatches=len(microbatches),
            seq_length=self._training.seq_length,
            micro_batch_size=self._training.micro_batch_size,
            forward_only=forward_only,
        )
        if proof is not None:
            with together():
                refuse(self._flow, proof.problems)
            self._proven = True
        return self._summed(told)

    def _proof(self, num_microbatches: int) -> LossProof:
        from megatron.core import parallel_state

        return LossProof(
            self._flow,
            samples_apart=num_microbatches * parallel_state.get_data_parallel_world_size() > 1,
            context=parallel_state.get_context_parallel_group()
            if parallel_state.get_context_parallel_world_size() > 1
            else None,
        )

    def _summed(self, told: list[Told]) -> dict[str, float]:
        """Sums over microbatches, and over the data- and context-parallel ranks of the last stage, which tells all."""
        from megatron.core import parallel_state

        stages = parallel_state.get_pipeline_model_parallel_group()
        last = dist.get_process_group_ranks(stages)[-1]
        if self._names is None:
            names = [list(told[0]) if told else []]
            if stages.size() > 1:
                dist.broadcast_object_list(names, last, group=stages)
            self._names = names[0]
        if told:
            sums = torch.stack([torch.stack([each[name].float() for each in told]).sum() for name in self._names])
            dist.all_reduce(sums, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        else:
            sums = torch.zeros(len(self._names), device=self._device)
        if stages.size() > 1:
            dist.broadcast(sums, last, group=stages)
        return dict(zip(self._names, sums.tolist(), strict=True))
