"""The random streams of a run, in the form of Megatron-LM's checkpoints under `rng_state`."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mcore_convert.errors import UnreadableCheckpoint

KEY = "rng_state"


def sharded(*, is_loading: bool = False) -> Any:
    """Return Megatron's `ShardedObject` of the streams of all data-parallel ranks with the same part of the model."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    states: list[Any] = [None] * group.size()
    if not is_loading:
        dist.all_gather_object(states, _state(), group=group)
    place = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    grid = (
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
    return ShardedObject(KEY, states, grid, place, replica_id=group.rank())


def restore(states: Any) -> None:
    """Restore the streams that `sharded` has saved.

    Raises:
        UnreadableCheckpoint: they are of another number of data-parallel ranks, or of another kind of device.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    if not isinstance(states, list) or len(states) != group.size():
        raise UnreadableCheckpoint(f"`{KEY}` does not hold the random states of {group.size()} data-parallel ranks")
    state = states[group.rank()]
    if (state["cuda_rng_state"] is None) == torch.cuda.is_available():
        raise UnreadableCheckpoint(f"`{KEY}` is of another kind of device")
    random.setstate(state["random_rng_state"])
    np.random.set_state(state["np_rng_state"])
    torch.set_rng_state(state["torch_rng_state"])
    if state["cuda_rng_state"] is not None:
        torch.cuda.set_rng_state(state["cuda_rng_state"])
    get_cuda_rng_tracker().set_states(state["rng_tracker_states"])


def _state() -> dict[str, Any]:
    """Return this rank's streams, under Megatron-LM's names (`checkpointing.py`, `get_rng_state`)."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "rng_tracker_states": get_cuda_rng_tracker().get_states(),
    }
