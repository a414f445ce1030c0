"""Megatron Core without CUDA: the few entry points that raise there, replaced while in scope.

Everything replaced here raises on a machine without CUDA, so nothing that worked before works differently. With CUDA
the functions do nothing. Determined by running megatron-core 0.16.1; each entry names the place that calls it.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

_replaced: list[tuple[Any, str, Any]] = []  # owner, attribute, original value


@functools.cache
def import_megatron() -> None:
    """Import Megatron Core once, without its warnings that Apex and Transformer Engine, not needed here, are absent."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(Transformer Engine and )?Apex (is|are) not installed")
        warnings.filterwarnings("ignore", category=DeprecationWarning)  # modules that Megatron Core imports from itself
        with _uncompiled():
            import megatron.core.dist_checkpointing
            import megatron.core.models.gpt.gpt_layer_specs
            import megatron.core.parallel_state  # noqa: F401


@contextlib.contextmanager
def _uncompiled() -> Iterator[None]:
    """Scope in which `torch.compile` as a decorator leaves functions unchanged, on a machine without CUDA.

    Megatron Core decorates some fifty functions with it (`megatron/core/jit.py`), of which a CPU runs few, on little
    data. The first compiled one would load a compiler that takes as long to import as torch itself, and each would call
    a C++ compiler, for seconds, which may not be installed at all.
    """
    import torch

    if torch.cuda.is_available():
        yield
        return
    original = torch.compile

    def decorator(function: Callable[..., Any] | None = None, **_options: Any) -> Any:
        return decorator if function is None else function

    torch.compile = decorator  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = original


@contextlib.contextmanager
def without_cuda() -> Iterator[None]:
    """Scope in which Megatron Core runs on the CPU; may be nested, and restores everything."""
    mine = enable()
    try:
        yield
    finally:
        if mine:
            disable()


def enable() -> bool:
    """Let Megatron Core run on the CPU until `disable()`; return whether this call enabled it. No effect with CUDA."""
    import torch
    import torch.utils._device

    import_megatron()
    if _replaced or torch.cuda.is_available():
        return False
    # torch caches the functions that `with torch.device(..)` intercepts, as they are when it is first entered, as in
    # YaRN
    torch.utils._device._device_constructors()
    for owner, attribute, replacement in _replacements():
        _replaced.append((owner, attribute, getattr(owner, attribute, None)))
        setattr(owner, attribute, replacement)
    return True


def disable() -> None:
    """Undo `enable()`."""
    while _replaced:
        owner, attribute, original = _replaced.pop()
        setattr(owner, attribute, original)


def _replacements() -> list[tuple[Any, str, Any]]:
    import torch
    from megatron.core.fusions import fused_softmax
    from megatron.core.ssm import gated_delta_net
    from megatron.core.tensor_parallel import random

    def causal_mask(length: int) -> torch.Tensor:
        return torch.ones(length, length, dtype=torch.bool).triu(1)

    return [
        # models/common/embeddings/rotary_pos_embedding.py:162, utils.py:631 (the buffer of unfused attention),
        # distributed/param_and_grad_buffer.py:806, pipeline_parallel/p2p_communication.py:313
        (torch.cuda, "current_device", lambda: torch.device("cpu")),
        # pipeline_parallel/p2p_communication.py:398
        (torch.cuda, "synchronize", lambda device=None: None),
        # models/common/language_module/language_module.py:244 (tied embeddings over pipeline stages)
        (torch.Tensor, "cuda", lambda tensor, *_args, **_kwargs: tensor),
        # optimizer/optimizer.py:671, optimizer/distrib_optimizer.py:361 sort parameters by the name of their type
        (torch.Tensor, "type", _type_as_on_cuda(torch.Tensor.type)),
        # schedules.py:596 and :2138, optimizer.py:481, clip_grads.py:103, rope_utils.py:62 (with pinned memory)
        *((torch, name, _on_cpu(getattr(torch, name))) for name in ("tensor", "zeros", "ones", "empty", "full")),
        *((torch, name, _on_cpu(getattr(torch, name))) for name in ("arange", "empty_like", "zeros_like")),
        # transformer/utils.py:35, where no attention mask is given
        (fused_softmax, "get_default_causal_mask", causal_mask),
        # transformer/dot_product_attention.py forks it in every forward; resolved by name in initialize_rng_tracker()
        (random, "CudaRNGStatesTracker", _cpu_rng_tracker()),
        # tensor_parallel/random.py:106: recomputed activations draw the same numbers again
        (random, "_get_cuda_rng_state", lambda *_args, **_kwargs: torch.get_rng_state()),
        (random, "_set_cuda_rng_state", lambda state, *_args, **_kwargs: torch.set_rng_state(state)),
        # ssm/gated_delta_net.py:95, :356 and :371: kernels for CUDA, one of which has an alternative in torch beside it
        (gated_delta_net, "HAVE_FLA", True),
        (gated_delta_net, "chunk_gated_delta_rule", gated_delta_net.torch_chunk_gated_delta_rule),
        (gated_delta_net, "l2norm", _unit_length),
    ]


def _unit_length(vectors: Any) -> Any:
    """Return vectors divided by their length, as flash-linear-attention's `l2norm` does."""
    import torch

    return vectors * torch.rsqrt(vectors.float().square().sum(-1, keepdim=True) + 1e-6).to(vectors.dtype)


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    """Return a factory of tensors that uses the CPU in place of a CUDA device, and memory that is not pinned."""

    @functools.wraps(factory)
    def made(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return made


def _type_as_on_cuda(type_of: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `Tensor.type` that gives Megatron's optimizers, and no other caller, the type's name with CUDA."""

    @functools.wraps(type_of)
    def named(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        answer = type_of(tensor, *args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if isinstance(answer, str) and caller.startswith("megatron.core.optimizer"):
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    return named


@functools.cache
def _cpu_rng_tracker() -> type:
    """Return a class for Megatron's named random streams, over torch's CPU generator instead of the CUDA one."""
    import torch
    from megatron.core.tensor_parallel import random

    class CpuRngStatesTracker(random.CudaRNGStatesTracker):
        """The same streams and the same rules; states are those of the CPU generator."""

        _current_state_name: str

        def add(self, name: str, seed: int) -> None:
            """Start the stream `name` at `seed`.

            Raises:
                ValueError: the name or the seed is taken.
            """
            if seed in self.seeds_ or name in self.states_:
                raise ValueError(f"random stream `{name}` or seed {seed} exists already")
            self._is_initialized = True
            self.seeds_.add(seed)
            self.states_[name] = torch.Generator(device="cpu").manual_seed(seed).get_state()

        @contextlib.contextmanager
        def fork(self, name: str = random._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
            """Draw from the stream `name` within; the outer stream continues afterwards from its state."""
            if name not in self.states_:
                raise ValueError(f"random stream `{name}` was not added")
            outer_name, outer = self._current_state_name, torch.get_rng_state()
            if outer_name != "default-rng":  # the outer stream has a name: a nested fork of it must continue from here
                self.states_[outer_name] = outer
            torch.set_rng_state(self.states_[name])
            self._current_state_name = name
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()
                torch.set_rng_state(self.states_.get(outer_name, outer))
                self._current_state_name = outer_name

    return CpuRngStatesTracker
