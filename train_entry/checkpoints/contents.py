"""Contents of a run's checkpoint: Megatron-LM's state dict, and under `train_entry` the data of this project alone."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from mcore_convert.checkpoints.runs import OURS
from mcore_convert.megatron.checkpoint import named
from mcore_convert.spec.config.arguments import TorchDtype
from train_entry.checkpoints import optimizer_state, random_state
from train_entry.config.schema import Config
from train_entry.state import TrainState

VERSION = 1

# Arguments that decide how the tensors of a run are spread over ranks: if all are equal, a resumed run is bit-equal.
LAYOUT = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "world_size",
)


def contents(state: TrainState, config: Config) -> dict[str, Any]:
    """Return the sharded state dict of a run on this rank, its tensors not copied (`generate_state_dict`)."""
    distributed = config.parallel.distributed_optimizer
    models = sharded_models(state.model)
    content: dict[str, Any] = {
        **models,
        "args": argparse.Namespace(**_arguments(state, config)),
        "checkpoint_version": 3.0,
        "iteration": state.iteration,
        "content_metadata": _content_metadata(distributed),
        "num_floating_point_operations_so_far": state.num_floating_point_operations,
        "rng_state": random_state.sharded(),
        OURS: {"version": VERSION, "config": config.model_dump_json()},
    }
    if config.checkpoint.save_optimizer:
        entries = optimizer_state.entries_of(models.values())
        tensors = optimizer_state.tensors_of(state.optimizer, entries, optimizer_state.own_master_key)
        content |= {
            "optimizer": optimizer_state.common_of(state.optimizer),
            "opt_param_scheduler": state.scheduler.state_dict(),
            **({"optimizer_state": tensors} if tensors else {}),
        }
    return content


def sharded_models(chunks: Sequence[Any]) -> dict[str, dict[str, Any]]:
    """Return the sharded state dict of each model chunk on this rank, under Megatron-LM's names for them."""
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {**_content_metadata(distributed=False), "dp_cp_group": group}
    stages = named([bare(chunk) for chunk in chunks])
    return {name: stage.sharded_state_dict(metadata=dict(metadata)) for name, stage in stages.items()}


def bare(chunk: Any) -> Any:
    """Return a model chunk without the wrappers around it."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def layout_of(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that decide how a run is spread over ranks."""
    return {name: args.get(name) or 1 for name in LAYOUT}


def _content_metadata(distributed: bool) -> dict[str, Any]:
    """Return the forms that Megatron Core is to use to load (Megatron-LM, `_build_sharded_state_dict_metadata`)."""
    form = {
        "distrib_optim_sharding_type": optimizer_state.FULLY_RESHARDABLE,
        "distrib_optim_fully_reshardable_mem_efficient": False,
    }
    return {"singleton_local_shards": False, "chained_optim_avoid_prefix": True, **(form if distributed else {})}


def _arguments(state: TrainState, config: Config) -> dict[str, Any]:
    """Return Megatron-LM's arguments, with the position in the data where Megatron-LM reads it."""
    import torch

    plain = {
        name: getattr(torch, value.name) if isinstance(value, TorchDtype) else value
        for name, value in state.args.items()
    }
    return {
        **plain,
        "iteration": state.iteration,
        "consumed_train_samples": state.consumed_samples,
        "no_save_optim": None if config.checkpoint.save_optimizer else True,
        "no_save_rng": None,
    }
