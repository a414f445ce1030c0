"""Times of the kernels of a training step on a GPU, by purpose."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

Shares = dict[str, float]  # milliseconds by purpose

# The first pattern found in a kernel's name decides.
PURPOSES = {
    "communication": r"nccl",
    "attention": r"sdpa|flash|fmha|compute_dot_do_o|convert_dq",
    "matrix products": r"nvjet|gemm|cutlass|cublas|splitK",
    "loss": r"^_statistics|^_overwrite",
    "gated activation": r"^_swiglu|triton.*silu|triton.*gelu",
    "norms and residuals (compiled)": r"triton.*norm",
    "rotary positions, heads (compiled)": r"triton.*(cat|split|slice|permute)",
    "other compiled parts of layers": r"triton",
    "optimizer": r"multi_tensor_apply|BinaryFunctor|copy_kernel|FillFunctor",
    "adding up gradients in fp32": r"CUDAFunctor_add",
    "embedding": r"embedding|compute_grad_weight|sum_and_scatter|gather_kernel|RadixSort|radix_sort",
}
OTHER, IDLE = "other kernels", "no kernel runs"


def profiled(step: Callable[[], object]) -> Shares:
    """Return the milliseconds of the kernels of one step by purpose, largest first. Overlapping kernels both count."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU], acc_events=True) as trace:
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        wall = 1e3 * (time.perf_counter() - start)
    spans = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in trace.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
    ]
    return shares_of(spans, wall)


def shares_of(spans: list[tuple[str, float, float]], wall: float) -> Shares:
    """Return milliseconds by purpose, from kernels with start and end in microseconds; `wall` is that of the step."""
    shares: Shares = {}
    for name, start, end in spans:
        purpose = next((each for each, pattern in PURPOSES.items() if re.search(pattern, name)), OTHER)
        shares[purpose] = shares.get(purpose, 0.0) + (end - start) / 1e3
    shares = dict(sorted(shares.items(), key=lambda item: -item[1]))
    return {**shares, IDLE: max(0.0, wall - _covered(spans))}


def _covered(spans: list[tuple[str, float, float]]) -> float:
    """Return the milliseconds in which any kernel runs."""
    covered, last = 0.0, float("-inf")
    for _, start, end in sorted(spans, key=lambda span: span[1]):
        covered += max(0.0, end - max(start, last))
        last = max(last, end)
    return covered / 1e3
