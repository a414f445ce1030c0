"""Gradient norm, clipping and copies of Megatron's optimizers over all tensors at once, and AdamW as one kernel.

Without Transformer Engine and Apex, megatron-core 0.16.1 falls back to loops over tensors (utils.py:1198): its gradient
norm waits for the device at each tensor. Here a step waits only once, for the norm itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


@contextlib.contextmanager
def foreach_optimizers() -> Iterator[None]:
    """Scope in which Megatron's optimizers work on all tensors at once; may be nested.

    If Transformer Engine or Apex provide kernels, it changes nothing.
    """
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads, optimizer

    wanted = [
        (clip_grads, "l2_norm_impl", utils.local_multi_tensor_l2_norm, _norm),
        (clip_grads, "multi_tensor_scale_impl", utils.local_multi_tensor_scale, _scale),
        (optimizer, "multi_tensor_scale_impl", utils.local_multi_tensor_scale, _scale),
        (optimizer, "_multi_tensor_copy_this_to_that", optimizer._multi_tensor_copy_this_to_that, _copy),
    ]
    local = clip_grads.l2_norm_impl is utils.local_multi_tensor_l2_norm
    replaced = [
        (module, name, fallback, ours)
        for module, name, fallback, ours in wanted
        if local and getattr(module, name) is fallback
    ]
    for module, name, _, ours in replaced:
        setattr(module, name, ours)
    try:
        yield
    finally:
        for module, name, fallback, _ in replaced:
            setattr(module, name, fallback)


def fuse(optimizer: Any) -> None:
    """Let torch's AdamW update all parameters of a group in one kernel; after building, and again after loading.

    A checkpoint brings the flags of the run that wrote it. The fused kernel needs the step counts on the device of
    the parameters.
    """
    for each in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = each.optimizer
        if not isinstance(inner, torch.optim.Adam):  # including AdamW
            continue
        for group in inner.param_groups:
            group["fused"], group["foreach"] = True, None
            for parameter in group["params"]:
                state = inner.state.get(parameter)
                if state and "step" in state:
                    state["step"] = state["step"].to(device=parameter.device, dtype=torch.float32)


def _norm(_: int, __: Tensor, tensors: Sequence[Sequence[Tensor]], ___: bool, *____: Any) -> tuple[Tensor, None]:
    norms = torch._foreach_norm(list(tensors[0]), 2, torch.float32)
    return torch.linalg.vector_norm(torch.stack(norms)).reshape(1), None


def _scale(_: int, __: Tensor, tensors: Sequence[Sequence[Tensor]], scale: float) -> None:
    sources, targets = (list(each) for each in tensors)
    if all(source.data_ptr() == target.data_ptr() for source, target in zip(sources, targets, strict=True)):
        torch._foreach_mul_(targets, scale)
    elif scale == 1.0:
        torch._foreach_copy_(targets, sources)
    else:
        torch._foreach_copy_(targets, torch._foreach_mul(sources, scale))


def _copy(this: Sequence[Tensor], that: Sequence[Tensor], overflow_buf: Tensor | None = None) -> None:
    """Copy `this` to `that`, of any dtypes."""
    if this:
        torch._foreach_copy_(list(that), list(this))
