"""Core attention over torch's `scaled_dot_product_attention`, behind the interface of Megatron Core's own."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from mcore_convert.errors import ConfigError

# On a GPU, the first available one is used: forward and backward they take 5, 8 and 19 ms for 8 samples of 4,096 tokens
# on an H200. The math kernel, which keeps every score, is not among them: torch raises if no other is available.
KERNELS = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
# The others add gradients in any order. Flash attention takes no mask and no fp32: these are left to the math kernel.
DETERMINISTIC = (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH)


class SdpaAttention(torch.nn.Module):
    """Attention: query, key and value `[tokens, samples, heads, channels]` to `[tokens, samples, heads * channels]`.

    It computes the same as Megatron's `DotProductAttention`, and draws the same dropout where both run torch's own
    code, on a CPU; on a GPU there is no `[tokens, tokens]` of scores. Keys and values may have fewer heads. Without a
    mask attention is causal; with one, only the mask counts, as in Megatron: bool, True for hidden tokens.

    With context parallelism a rank holds chunks `r` and `2 cp - 1 - r` of the `2 cp` that a sequence is cut into, as
    Megatron's `get_batch_on_this_cp_rank` cuts it. Keys and values of the whole sequence are gathered, and kept for the
    backward pass: per layer and sample `2 * tokens * key heads * channels` elements, which grouped queries keep small.
    A mask then has the rank's own tokens as rows, in that order, and all tokens as columns, in theirs.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__()
        if config.softmax_type != "vanilla" or config.window_size is not None:
            raise ConfigError("attention over torch's kernels has no sliding window and no softmax offset")
        self.causal = attn_mask_type.name == "causal"
        # Megatron's scaling by the layer's number is undone in its softmax, so it is left out here
        self.scale = softmax_scale or 1 / math.sqrt(config.kv_channels)
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        # with sequence parallelism the whole block draws from this rank's own random stream already
        self.own_stream = not config.sequence_parallel
        self.kernels = DETERMINISTIC if config.deterministic_mode else KERNELS
        self.cp_group = None
        if config.context_parallel_size > 1:
            from megatron.core import parallel_state

            self.cp_group = pg_collection.cp if pg_collection else parallel_state.get_context_parallel_group()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        if attention_bias is not None or packed_seq_params is not None:
            raise ConfigError("attention over torch's kernels takes a mask, and no bias and no packed lengths")
        if self.cp_group is None:
            attended = self._attend(query, key, value, attention_mask)
        else:
            attended = self._attend_to_all_ranks(query, key, value, attention_mask)
        return attended.flatten(2)

    def _attend_to_all_ranks(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        assert self.cp_group is not None
        key, value = _GatherTokens.apply(key, value, self.cp_group)
        if mask is not None or not self.causal:
            return self._attend(query, key, value, mask)
        ranks, rank = self.cp_group.size(), self.cp_group.rank()
        early, late = query.chunk(2)
        chunk = len(early)
        ends = (rank + 1) * chunk, (2 * ranks - rank) * chunk  # a chunk attends to all before it, to itself causally
        return torch.cat(
            [self._attend(each, key[:end], value[:end], None) for each, end in zip((early, late), ends, strict=True)]
        )

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Return the attention of the last `len(query)` tokens to the `len(key)` tokens."""
        causal = self.causal and mask is None and len(query) > 1
        bias: Any = None if mask is None else ~mask
        if causal and len(query) < len(key):
            # loads torch's compiler, which a run on one rank never needs
            from torch.nn.attention.bias import causal_lower_right

            bias, causal = causal_lower_right(len(query), len(key)), False
        grouped = query.size(2) != key.size(2)
        if grouped and query.is_cuda and not _takes_groups(query, mask):
            each = query.size(2) // key.size(2)
            key, value, grouped = key.repeat_interleave(each, 2), value.repeat_interleave(each, 2), False
        dropout = self.dropout if self.training else 0.0
        with self._kernel(query), self._random_stream(dropout):
            attended = scaled_dot_product_attention(
                query.permute(1, 2, 0, 3),
                key.permute(1, 2, 0, 3),
                value.permute(1, 2, 0, 3),
                attn_mask=bias,
                dropout_p=dropout,
                is_causal=causal,
                scale=self.scale,
                enable_gqa=grouped,
            )
        return attended.permute(2, 0, 1, 3)

    def _kernel(self, query: Tensor) -> contextlib.AbstractContextManager[None]:
        if not query.is_cuda:
            return contextlib.nullcontext()
        return sdpa_kernel(list(self.kernels), set_priority=True)

    def _random_stream(self, dropout: float) -> contextlib.AbstractContextManager[None]:
        """Return the scope for dropout: tensor-parallel ranks have other heads, so each has its own stream."""
        if not dropout or not self.own_stream:
            return contextlib.nullcontext()
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        stream: contextlib.AbstractContextManager[None] = get_cuda_rng_tracker().fork()
        return stream


def _takes_groups(query: Tensor, mask: Tensor | None) -> bool:
    """Return whether the kernel for this query takes keys with fewer heads: flash attention does, others do not."""
    fast = query.dtype in (torch.float16, torch.bfloat16) and torch.cuda.get_device_capability(query.device) >= (8, 0)
    return fast and mask is None


class _GatherTokens(torch.autograd.Function):
    """Keys and values of all context-parallel ranks, in the order of the sequence; backwards, gradients are summed."""

    @staticmethod
    def forward(ctx: Any, key: Tensor, value: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        ctx.group = group
        mine = torch.stack((key, value))
        gathered = mine.new_empty(group.size(), *mine.shape)
        dist.all_gather_into_tensor(gathered.flatten(0, 1), mine, group=group)  # gloo needs the ranks in one axis
        # [ranks, 2, 2 chunks, ...]: first chunks by rank, then last chunks from the last rank to the first
        first, last = gathered.unflatten(2, (2, -1)).unbind(2)
        whole = torch.cat((first, last.flip(0))).transpose(0, 1).flatten(1, 2)
        return whole[0], whole[1]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        ranks = ctx.group.size()
        chunks = torch.stack(gradients).unflatten(1, (2 * ranks, -1))
        first, last = chunks[:, :ranks], chunks[:, ranks:].flip(1)
        whole = torch.stack((first, last), 2).transpose(0, 1).flatten(2, 3).contiguous()  # [ranks, 2, tokens, ...]
        mine = torch.empty_like(whole[0])
        dist.reduce_scatter_tensor(mine, whole.flatten(0, 1), group=ctx.group)
        return mine[0], mine[1], None
