"""The logits of a Megatron Core model, under any tensor- and pipeline-parallel layout."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from mcore_convert.megatron.cpu import without_cuda

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel


def logits(model: GPTModel | Sequence[GPTModel], tokens: torch.Tensor) -> torch.Tensor:
    """Return float32 logits `[batch, seq, padded vocabulary]` of tokens `[batch, seq]`, on all ranks; no gradients.

    `model` is the part of this rank: a model, or the list from `build_stages`. All ranks of the model call this
    together with the same tokens.
    """
    from megatron.core import parallel_state

    chunks = list(model) if isinstance(model, Sequence) else [model]
    group = parallel_state.get_pipeline_model_parallel_group()
    ranks = torch.distributed.get_process_group_ranks(group)
    here, last = ranks.index(torch.distributed.get_rank()), len(ranks) * len(chunks) - 1
    batch, length = tokens.shape
    positions = torch.arange(length, device=tokens.device).expand(batch, length)
    out = torch.empty(0)
    with torch.no_grad(), without_cuda():
        for virtual, chunk in enumerate(chunks):  # stages pass over all ranks once per virtual stage
            stage = virtual * len(ranks) + here
            chunk.eval()
            if stage > 0 and len(ranks) > 1:
                hidden = torch.empty(length, batch, chunk.config.hidden_size, dtype=chunk.config.pipeline_dtype)
                hidden = hidden.to(tokens.device)
                torch.distributed.recv(hidden, ranks[here - 1], group=group)
                chunk.set_input_tensor(hidden)
            with _without_predicting(chunk):
                out = chunk(tokens, positions, None)  # no mask: causal
            if stage < last and len(ranks) > 1:
                torch.distributed.send(out.contiguous(), ranks[(here + 1) % len(ranks)], group=group)
        return _on_all_stages(out, chunks[-1], tokens, ranks)


@contextlib.contextmanager
def _without_predicting(chunk: GPTModel) -> Iterator[None]:
    """Scope without the layers that predict further tokens, with which a model needs labels."""
    if not chunk.config.mtp_num_layers:
        yield
        return
    layers, process = chunk.config.mtp_num_layers, chunk.mtp_process
    chunk.config.mtp_num_layers, chunk.mtp_process = None, False
    try:
        yield
    finally:
        chunk.config.mtp_num_layers, chunk.mtp_process = layers, process


def _on_all_stages(out: torch.Tensor, chunk: GPTModel, tokens: torch.Tensor, ranks: list[int]) -> torch.Tensor:
    """Return the last stage's logits on every stage, gathered from the tensor-parallel ranks."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    tp = parallel_state.get_tensor_model_parallel_group()
    if chunk.post_process:
        whole: torch.Tensor = gather_from_tensor_model_parallel_region(out, group=tp).float().contiguous()
    else:
        whole = torch.empty(*tokens.shape, chunk.vocab_size, device=tokens.device)
    if len(ranks) > 1:
        group = parallel_state.get_pipeline_model_parallel_group()
        torch.distributed.broadcast(whole, ranks[-1], group=group)
    return whole
