"""Scopes around a model in training: whole parameters, no dropout, no needless warnings."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@contextlib.contextmanager
def parameters_gathered(model: Sequence[Any]) -> Iterator[None]:
    """Scope in which every parameter is whole, even where forward passes gather them one by one."""
    gathering = [chunk for chunk in model if chunk.ddp_config.overlap_param_gather]
    for chunk in gathering:
        chunk.disable_forward_pre_hook(param_sync=True)
    try:
        yield
    finally:
        for chunk in gathering:
            chunk.enable_forward_pre_hook()


@contextlib.contextmanager
def evaluating(model: Sequence[Any]) -> Iterator[None]:
    """Scope without dropout."""
    with parameters_gathered(model):
        for chunk in model:
            chunk.eval()
        try:
            yield
        finally:
            for chunk in model:
                chunk.train()


@contextlib.contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Scope in which torch computes the same bits each time, even on a GPU, or raises where it cannot."""
    if not wanted:
        yield
        return
    before, workspace = torch.are_deterministic_algorithms_enabled(), os.environ.get(WORKSPACE)
    torch.use_deterministic_algorithms(True)
    # torch requires it then. Not otherwise: while it is set, torch 2.11 parses it again at every matrix product,
    # which then takes the host 50 to 120 us instead of 13
    os.environ.setdefault(WORKSPACE, ":4096:8")
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        if workspace is None:
            del os.environ[WORKSPACE]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Scope without warnings of Megatron and torch about intended behaviour."""
    with warnings.catch_warnings():
        # distrib_optimizer.py:2296 also clears gradients of views of parameters, which have none
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        # torch 2.13 has new names for collectives that megatron-core calls by the old ones, the only ones in older
        # torch
        warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
        # tensor_parallel/layers.py:914, about experts that are not split while attention is
        warnings.filterwarnings(
            "ignore", message="`sequence_parallel` is set to `True`, but tensor model parallel size"
        )
        yield
