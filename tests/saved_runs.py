"""Short runs of `fixtures.training`'s loop that save and go on through `train_entry.checkpoints`, on forked ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fixtures.megatron import fill, layout_arguments
from fixtures.training import SAMPLES, Step, _build, _step
from mcore_convert.megatron.parallel import model_parallel
from mcore_convert.spec.layout import Layout
from tests.ranks import run_ranks
from train_entry.checkpoints import Checkpoints, Restored, source_of
from train_entry.config.schema import Config
from train_entry.initialize import together
from train_entry.optimizer.torch_adam import torch_adam_goes_on
from train_entry.state import TrainState

SMALL: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "kv_channels": 8,
    "max_position_embeddings": 16,
    "seq_length": 16,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "swiglu": True,
    "untie_embeddings_and_output_weights": True,
    "vocab_size": 64,
    "padded_vocab_size": 64,
    "make_vocab_size_divisible_by": 16,
}
SEVERAL_BUCKETS = {"overlap_grad_reduce": True, "ddp_bucket_size": 4000}  # with padding between them


@dataclass(frozen=True)
class Outcome:
    """What a run found at its start, and its steps after that."""

    restored: Restored
    steps: list[Step]

    @property
    def losses(self) -> list[float]:
        return [step.loss for step in self.steps]


def config_of(run_dir: Path, *, distributed: bool = False, tp: int = 1, data: Any = None, **checkpoint: Any) -> Config:
    """Return a run's configuration, as far as checkpoints read it."""
    return Config.model_validate(
        {
            "run_dir": run_dir,
            "parallel": {"distributed_optimizer": distributed, "tp": tp},
            "data": data or {},
            "checkpoint": checkpoint,
        }
    )


def trained(
    args: Mapping[str, Any], layout: Layout, config: Config, *, ranks: int | None = None, **options: Any
) -> Outcome:
    """Return what `train` returns on the ranks of a layout, or on more, which are data-parallel."""
    count = ranks or layout.tp * layout.pp * layout.ep
    outcomes: list[Outcome] = run_ranks(count, lambda: train(args, layout, config, **options))
    assert all(each.steps == outcomes[0].steps for each in outcomes)
    return outcomes[0]


def train(
    args: Mapping[str, Any],
    layout: Layout,
    config: Config,
    *,
    until: int,
    save_at: Collection[int] = (),
    dtype: torch.dtype = torch.float32,
    weights: Mapping[str, Tensor] | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> Outcome:
    """Train up to step `until`; call it on every rank.

    Args:
        weights: global tensors to start from, where the configuration names no checkpoint.
        report: is called with `start 5` where the run goes on after step 5, `loss 6 4.1` after a step, `save 6` before
            a checkpoint and `saved 6` after it.
    """
    distributed = config.parallel.distributed_optimizer
    groups = model_parallel(layout.tp, layout.pp, layout.vpp, layout.ep)
    with groups, torch_adam_goes_on(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        run = _build(args, layout, distributed, dtype)
        state = TrainState({**args, **_layout_arguments(layout)}, run.chunks, run.optimizer, run.scheduler)
        checkpoints = Checkpoints(config)
        with together():
            source = source_of(config)
        restored = checkpoints.restore(state, source)
        if restored.path is None:
            assert weights is not None
            for stage in run.stages:
                fill(stage, weights)
            for each in run.optimizer.chained_optimizers:
                each.reload_model_params()
        report(f"start {state.iteration}")
        steps = []
        while state.iteration < until:
            steps.append(_step(run, state.iteration))
            state.iteration += 1
            state.consumed_samples += SAMPLES
            report(f"loss {state.iteration} {steps[-1].loss!r}")
            if state.iteration in save_at:
                report(f"save {state.iteration}")
                checkpoints.save(state)
                report(f"saved {state.iteration}")
        checkpoints.finish()
        return Outcome(restored, steps)


def _layout_arguments(layout: Layout) -> dict[str, Any]:
    return {
        **layout_arguments(layout.tp, layout.pp, layout.vpp, layout.ep),
        "world_size": dist.get_world_size(),
        "transformer_impl": "local",
    }
