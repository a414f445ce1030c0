"""The process groups that Megatron Core needs to build a model: of one process, or of the initialised ranks."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

from mcore_convert.errors import LayoutError
from mcore_convert.megatron.cpu import import_megatron, without_cuda

SEED = 1  # of Megatron's random streams: they must exist, but without dropout nothing is drawn from them


@contextlib.contextmanager
def single_process() -> Iterator[None]:
    """Scope with this process as the only rank: a gloo group without a network, and model-parallel groups of one.

    Everything is torn down at the end. Groups that are initialised already are used and left as they are.

    Raises:
        LayoutError: torch.distributed is initialised with several ranks.
    """
    import torch.distributed as dist

    import_megatron()
    from megatron.core import parallel_state

    if dist.is_initialized():
        if dist.get_world_size() > 1:
            raise LayoutError(f"a model of one process was asked for among {dist.get_world_size()} ranks")
        with contextlib.nullcontext() if parallel_state.model_parallel_is_initialized() else model_parallel(1, 1):
            yield
        return
    with gloo_on_loopback():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with model_parallel(1, 1):
            yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def model_parallel(
    tp: int,
    pp: int,
    vpp: int | None = None,
    ep: int = 1,
    *,
    cp: int = 1,
    etp: int | None = None,
    seed: int = SEED,
    timeout_minutes: int = 10,
) -> Iterator[None]:
    """Scope of Megatron's groups over the initialised ranks, on the CPU without CUDA, with seeded random streams.

    Args:
        etp: tensor-parallel size of experts; unless given `tp`, or 1 where `ep` is more than 1.
        seed: seed of the random streams, the same on all ranks.
        timeout_minutes: time after which a collective stops waiting for a lost rank.

    Raises:
        LayoutError: the number of ranks is not a multiple of `tp * pp * cp`, or of `ep * pp`.
    """
    import torch.distributed as dist

    import_megatron()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import initialize_rng_tracker, model_parallel_cuda_manual_seed

    if dist.get_world_size() % (tp * pp * cp) or dist.get_world_size() // pp % ep:
        sizes = f"tp = {tp}, pp = {pp}, cp = {cp}, ep = {ep}"
        raise LayoutError(f"{dist.get_world_size()} ranks cannot be laid out as {sizes}")
    with without_cuda():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            # Megatron Core takes 1 as set, and would select the interleaved schedule
            virtual_pipeline_model_parallel_size=vpp if vpp and vpp > 1 else None,
            context_parallel_size=cp,
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=etp or (tp if ep == 1 else 1),
            distributed_timeout_minutes=timeout_minutes,
        )
        try:
            # an earlier tracker may be of another kind: one for CUDA, or made outside of a CPU scope
            initialize_rng_tracker(force_reset=True)
            model_parallel_cuda_manual_seed(seed)
            yield
        finally:
            parallel_state.destroy_model_parallel()
            _forget_groups()


def _forget_groups() -> None:
    """Release the groups that Megatron Core 0.16.1 keeps after `destroy_model_parallel`.

    A group that is freed in a forked child crashes it: gloo's threads do not survive a fork.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

    for name, value in vars(parallel_state).items():
        if isinstance(value, dist.ProcessGroup):
            setattr(parallel_state, name, None)
    for embedding in (RotaryEmbedding, YarnRotaryEmbedding):
        embedding.forward.cache_clear()  # keyed by module: would keep the last 32 with their groups


@contextlib.contextmanager
def gloo_on_loopback() -> Iterator[None]:
    """Keep gloo from resolving the host's name, which fails or waits on machines without a network."""
    name = "GLOO_SOCKET_IFNAME"
    loopback = next((each for _, each in socket.if_nameindex() if each in ("lo", "lo0")), None)
    if loopback is None or name in os.environ:
        yield
        return
    os.environ[name] = loopback
    try:
        yield
    finally:
        del os.environ[name]
