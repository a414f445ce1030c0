"""Transformer layers through `torch.compile`: norms, rotary positions, activations and residuals as one kernel each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

Layer = torch.nn.Module


def compiler_missing(device: torch.device) -> str | None:
    """Return why nothing can be compiled for this device; None if a trial succeeds. Needs Triton or a C++ compiler."""
    try:
        torch.compile(_probe, dynamic=False)(torch.ones(8, device=device))
    except Exception as error:  # any cause: no Triton, compiler, Python headers or writable cache
        return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return None


def compile_layers(chunks: Sequence[Any]) -> None:
    """Compile the forward pass of every transformer layer, after the model is in its data-parallel wrapper.

    Layers of one shape share one graph. Inputs and outputs of a layer are unchanged, so recomputation, pipeline
    stages and checkpoints are not affected.
    """
    for chunk in chunks:
        _keep_hooks_outside(chunk)
        for layer in _layers(chunk):
            _keep_outside(layer.self_attention)
            layer.forward = _after_hooks(layer, torch.compile(layer.forward, dynamic=False))


def _probe(values: torch.Tensor) -> torch.Tensor:
    return values * 2 + 1


def _layers(chunk: Any) -> Iterator[Layer]:
    while hasattr(chunk, "module"):
        chunk = chunk.module
    yield from chunk.decoder.layers


def _keep_outside(attention: Any) -> None:
    """Exclude operations from the graph: dropout from a random stream of its own, and Megatron's own communication.

    `train_entry.model.operations` gives the reason.
    """
    core = attention.core_attention
    if core.dropout or core.cp_group is not None:
        core.forward = torch.compiler.disable(core.forward)
    if attention.config.num_query_groups < attention.config.tensor_model_parallel_size:  # gathers parts of a group
        attention.get_query_key_value_tensors = torch.compiler.disable(attention.get_query_key_value_tensors)


def _keep_hooks_outside(chunk: Any) -> None:
    """Disable, during compilation, the hooks that wait for gathered parameters.

    With `overlap_param_gather` Megatron hooks every module. A graph would record the effect of a hook at compile time.
    """
    if not getattr(chunk, "use_forward_hook", False):
        return
    make = chunk._make_forward_pre_hook

    def make_outside() -> Callable[..., None]:
        hook = make()

        def outside(module: Layer, *unused: Any) -> None:
            if not torch.compiler.is_compiling():
                hook(module, *unused)

        return outside

    chunk._make_forward_pre_hook = make_outside
    if chunk.remove_forward_pre_hook_handles:
        chunk.disable_forward_pre_hook(param_sync=False)
        chunk.enable_forward_pre_hook()


def _after_hooks(layer: Layer, compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Return a compiled layer that first runs the hooks of the modules within it: they wait for its parameters."""
    inner = [module for module in layer.modules() if module is not layer]

    def forward(*args: Any, **kwargs: Any) -> Any:
        for module in inner:
            for hook in module._forward_pre_hooks.values():
                hook(module, ())
        return compiled(*args, **kwargs)

    return forward
