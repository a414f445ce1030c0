"""The process group of a run, on CPUs or GPUs, and errors that are reported once instead of by all ranks."""

from __future__ import annotations

import contextlib
import os
import random
import socket
from collections.abc import Iterator
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from mcore_convert.errors import ConvertError
from mcore_convert.megatron.parallel import gloo_on_loopback


class OtherRankError(ConvertError):
    """Refusal on another rank, which rank 0 reports."""


@contextlib.contextmanager
def process_group(timeout_minutes: int) -> Iterator[torch.device]:
    """Scope of the ranks that torchrun started, or of this process alone; yields the device of this rank.

    gloo without CUDA, NCCL (and gloo, for tensors on the CPU) with it. An existing group is used and left as it is.

    Raises:
        ConvertError: the ranks cannot connect.
    """
    device = _device()
    if dist.is_initialized():
        yield device
        return
    # kernels start in the order of their calls, so that communication overlaps with the following computation
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(minutes=timeout_minutes)
    device_id = device if device.type == "cuda" else None
    if "WORLD_SIZE" in os.environ and "RANK" in os.environ:
        # torchrun's ranks of one node connect without the name of the host, which may not resolve
        alone = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
        with gloo_on_loopback() if alone else contextlib.nullcontext():
            try:
                dist.init_process_group(backend, timeout=timeout, device_id=device_id)
            except (RuntimeError, ValueError) as error:
                where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
                reason = str(error).strip().splitlines()[0]
                rank = os.environ["RANK"]
                raise ConvertError(f"rank {rank} does not meet the others at {where}: {reason}") from error
    else:
        with gloo_on_loopback():
            store = dist.HashStore()
            dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout, device_id=device_id)
    try:
        yield device
    finally:
        dist.destroy_process_group()


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Scope that all ranks leave together: if one of them refuses, all refuse, and none waits for a lost rank.

    Within it ranks must not wait for each other, unless a refusal is one of all of them.

    Raises:
        ConvertError: the refusal, on the lowest rank that met one.
        OtherRankError: the same refusal, on the others.
    """
    refusal: ConvertError | None = None
    try:
        yield
    except ConvertError as error:
        refusal = error
    except OSError as error:
        refusal = ConvertError(f"{error.strerror or error}: `{error.filename}`" if error.filename else str(error))
        refusal.__cause__ = error
    if dist.is_initialized() and dist.get_world_size() > 1:
        refusals: list[tuple[str, tuple[str, ...], str | None] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(refusals, refusal and (refusal.message, refusal.items, refusal.hint))
        first = next((rank for rank, each in enumerate(refusals) if each is not None), None)
        if first is not None and first != dist.get_rank():
            message, items, hint = refusals[first] or ("", (), None)
            raise OtherRankError(f"on rank {first} ({socket.gethostname()}): {message}", items=items, hint=hint)
    if refusal is not None:
        raise refusal


def named_groups() -> dict[str, dist.ProcessGroup]:
    """Return the groups of this rank, by their names in a `Trainer`."""
    from megatron.core import parallel_state

    return {
        "tp": parallel_state.get_tensor_model_parallel_group(),
        "pp": parallel_state.get_pipeline_model_parallel_group(),
        "dp": parallel_state.get_data_parallel_group(),
        "cp": parallel_state.get_context_parallel_group(),
        "ep": parallel_state.get_expert_model_parallel_group(),
    }


def begin_streams(seed: int) -> None:
    """Seed the random streams of this rank, including those that user code may draw from.

    As in Megatron-LM (`initialize.py`, `_set_random_seed`), with one seed per pipeline stage.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)  # numpy accepts no more
    torch.manual_seed(seed)
