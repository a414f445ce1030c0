"""Triton kernels of the loss and of the gated activation. Imported only if there are CUDA and Triton."""

# mypy: disable-error-code="misc, no-untyped-def, untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

HALF = 1024  # elements of half a row in a block
COLUMNS, WARPS = 4096, 8  # elements of a row in a block: measured on an H200, 3.8 TB/s both ways


def statistics(logits: Tensor, places: Tensor) -> Tensor:
    """Return for each row the largest logit, the sum of exponentials relative to it, and the label's logit, or 0."""
    result = torch.empty(3, len(logits), dtype=torch.float32, device=logits.device)
    _statistics[(len(logits),)](
        logits, places, result, logits.stride(0), logits.size(1), len(logits), block=COLUMNS, num_warps=WARPS
    )
    return result


def overwrite(logits: Tensor, places: Tensor, normaliser: Tensor, gradient: Tensor) -> None:
    """Overwrite the logits with the gradient."""
    # the gradient may be one number for all tokens, as that of a sum
    _overwrite[(len(logits),)](
        logits,
        places,
        normaliser,
        gradient.contiguous(),
        logits.stride(0),
        logits.size(1),
        block=COLUMNS,
        num_warps=WARPS,
    )


def swiglu(hidden: Tensor) -> Tensor:
    """Return the first half of the last dimension through SiLU, times the second."""
    hidden = hidden.contiguous()
    width = hidden.size(-1) // 2
    product = hidden.new_empty(*hidden.shape[:-1], width)
    _swiglu[(product.numel() // width, triton.cdiv(width, HALF))](hidden, product, width, block=HALF)
    return product


def swiglu_backward(gradient: Tensor, hidden: Tensor) -> Tensor:
    """Return the gradient of both halves."""
    gradient, hidden = gradient.contiguous(), hidden.contiguous()
    result, width = torch.empty_like(hidden), gradient.size(-1)
    _swiglu_backward[(gradient.numel() // width, triton.cdiv(width, HALF))](gradient, hidden, result, width, block=HALF)
    return result


@triton.jit
def _statistics(logits, places, result, stride, words, tokens, block: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * stride
    largest = -3.4e38
    total = tl.zeros([block], tl.float32)
    for start in range(0, words, block):
        columns = start + tl.arange(0, block)
        values = tl.load(row + columns, mask=columns < words, other=-float("inf")).to(tl.float32)
        before = largest
        largest = tl.maximum(largest, tl.max(values, 0))
        total = total * tl.exp(before - largest) + tl.exp(values - largest)
    place = tl.load(places + token)
    here = (place >= 0) & (place < words)
    chosen = tl.load(row + place, mask=here, other=0.0).to(tl.float32)
    tl.store(result + token, largest)
    tl.store(result + tokens + token, tl.sum(total, 0))
    tl.store(result + 2 * tokens + token, chosen)


@triton.jit
def _overwrite(logits, places, normaliser, gradient, stride, words, block: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * stride
    place = tl.load(places + token)
    log_total = tl.load(normaliser + token)
    scale = tl.load(gradient + token)
    for start in range(0, words, block):
        columns = start + tl.arange(0, block)
        within = columns < words
        values = tl.load(row + columns, mask=within, other=0.0).to(tl.float32)
        values = tl.exp(values - log_total) - tl.where(columns == place, 1.0, 0.0)
        tl.store(row + columns, (values * scale).to(row.dtype.element_ty), mask=within)


@triton.jit
def _swiglu(hidden, product, width, block: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    within = columns < width
    row = hidden + token * 2 * width + columns
    gate = tl.load(row, mask=within).to(tl.float32)
    linear = tl.load(row + width, mask=within).to(tl.float32)
    activated = gate / (1 + tl.exp(-gate)) * linear
    tl.store(product + token * width + columns, activated.to(product.dtype.element_ty), mask=within)


@triton.jit
def _swiglu_backward(gradient, hidden, result, width, block: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    within = columns < width
    row = token * 2 * width + columns
    wide = tl.load(gradient + token * width + columns, mask=within).to(tl.float32)
    gate = tl.load(hidden + row, mask=within).to(tl.float32)
    linear = tl.load(hidden + row + width, mask=within).to(tl.float32)
    share = 1 / (1 + tl.exp(-gate))
    of_gate = wide * linear * share * (1 + gate * (1 - share))
    tl.store(result + row, of_gate.to(result.dtype.element_ty), mask=within)
    tl.store(result + row + width, (wide * gate * share).to(result.dtype.element_ty), mask=within)
