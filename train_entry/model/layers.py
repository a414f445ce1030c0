"""Megatron's transformer layers: with attention over torch's kernels, and in parts that one graph can hold."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.nn import functional

from mcore_convert.megatron.model import local_block_spec
from train_entry.model.attention import SdpaAttention

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules


def sdpa_spec(config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Megatron's local layers, with attention over torch's kernels."""
    block = local_block_spec(config, vp_stage)
    for layer in block.layer_specs or ():
        layer.submodules.self_attention.submodules.core_attention = SdpaAttention
    return block


def graph_spec(config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """The same, of modules that compile as one graph; of a `model_class` with rotary tables."""
    column, row, attention = _graph_modules()
    block = sdpa_spec(config, vp_stage)
    for layer in block.layer_specs or ():
        layer.submodules.self_attention.module = attention
        layer.submodules.self_attention.submodules.linear_qkv = column
        layer.submodules.self_attention.submodules.linear_proj = row
        layer.submodules.mlp.submodules.linear_fc1 = column
        layer.submodules.mlp.submodules.linear_fc2 = row
    return block


def rotate(heads: Tensor, tables: Tensor, *, interleaved: bool) -> Tensor:
    """Turn the first channels of `[tokens, samples, heads, channels]` by their positions, in fp32.

    Megatron's own rounds cosines and sines to the precision of the model first, and puts halves together twice.
    """
    turned, rest = heads[..., : tables.size(-1)], heads[..., tables.size(-1) :]
    if interleaved:
        (cos, sin), (first, second) = tables[..., ::2], turned.float().unflatten(-1, (-1, 2)).unbind(-1)
        both = torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2)
    else:
        (cos, sin), (first, second) = tables.chunk(2, -1)[0], turned.float().chunk(2, -1)
        both = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    both = both.to(heads.dtype)
    return torch.cat((both, rest), -1) if rest.size(-1) else both


@functools.cache
def _graph_modules() -> tuple[type, type, type]:
    """The classes, made once Megatron Core is there."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.attention import SelfAttention

    class GraphColumnParallelLinear(ColumnParallelLinear):
        """Megatron's linear layer over columns, whose messages overlap its products in one operation of the graph."""

        def _forward_impl(
            self,
            input: Tensor,  # noqa: A002
            weight: Tensor,
            bias: Tensor | None,
            sequence_parallel: bool,
            **_: Any,
        ) -> Tensor:
            if self.tp_group.size() == 1:
                return functional.linear(input, weight, bias)
            product: Tensor = torch.ops.train_entry.column_linear(
                input, weight, sequence_parallel, self.tp_group.group_name
            )
            return product if bias is None else product + bias

    class GraphRowParallelLinear(RowParallelLinear):
        """Megatron's linear layer over rows."""

        def _forward_impl(self, input: Tensor, weight: Tensor, **_: Any) -> Tensor:  # noqa: A002
            return functional.linear(input, weight)

    class GraphSelfAttention(SelfAttention):
        """As much of Megatron's self-attention as training takes, with cosines and sines from tables."""

        def forward(
            self, hidden_states: Tensor, attention_mask: Tensor | None, rotary_pos_emb: Tensor | None = None, **_: Any
        ) -> tuple[Tensor, Tensor | None]:
            query, key, value = self.get_query_key_value_tensors(hidden_states)
            if rotary_pos_emb is not None:
                query, key = (
                    rotate(each, rotary_pos_emb, interleaved=self.config.rotary_interleaved) for each in (query, key)
                )
            attended = self.core_attention(query, key, value, attention_mask, attn_mask_type=self.attn_mask_type)
            output, bias = self.linear_proj(attended)
            return output, bias

    return GraphColumnParallelLinear, GraphRowParallelLinear, GraphSelfAttention


@torch.library.custom_op(
    "train_entry::column_linear",
    mutates_args=(),
    schema="(Tensor hidden, Tensor weight, bool sequence_parallel, str group) -> Tensor",
)
def column_linear(hidden: Tensor, weight: Tensor, sequence_parallel: bool, group: str) -> Tensor:
    """The product with this rank's rows of the weight, of all tokens where ranks hold some each."""
    if sequence_parallel:
        hidden, gathering = _gather(hidden, group)
        gathering.wait()
    return functional.linear(hidden, weight)


@column_linear.register_fake
def _(hidden: Tensor, weight: Tensor, sequence_parallel: bool, group: str) -> Tensor:
    ranks = _ranks(group).size() if sequence_parallel else 1
    return hidden.new_empty(ranks * hidden.size(0), *hidden.shape[1:-1], weight.size(0))


@torch.library.custom_op(
    "train_entry::column_linear_backward",
    mutates_args=(),
    schema="(Tensor gradient, Tensor hidden, Tensor weight, bool sequence_parallel, str group) -> (Tensor, Tensor)",
)
def column_linear_backward(
    gradient: Tensor, hidden: Tensor, weight: Tensor, sequence_parallel: bool, group: str
) -> tuple[Tensor, Tensor]:
    """Gradients of hidden states and weight. As in Megatron, messages are under way while products are computed.

    That they start first is up to `CUDA_DEVICE_MAX_CONNECTIONS=1`.
    """
    gradient = gradient.contiguous()
    if sequence_parallel:
        hidden, gathering = _gather(hidden, group)
    of_all = gradient @ weight
    if sequence_parallel:
        of_hidden = of_all.new_empty(len(of_all) // _ranks(group).size(), *of_all.shape[1:])
        summing = dist.reduce_scatter_tensor(of_hidden, of_all, group=_ranks(group), async_op=True)
        gathering.wait()
    else:
        of_hidden = of_all
        summing = dist.all_reduce(of_hidden, group=_ranks(group), async_op=True)
    of_weight = gradient.flatten(0, -2).t() @ hidden.flatten(0, -2)
    summing.wait()
    return of_hidden, of_weight


@column_linear_backward.register_fake
def _(gradient: Tensor, hidden: Tensor, weight: Tensor, sequence_parallel: bool, group: str) -> tuple[Tensor, Tensor]:
    return hidden.new_empty(hidden.shape), weight.new_empty(weight.shape)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    hidden, weight, ctx.sequence_parallel, ctx.group = inputs
    ctx.save_for_backward(hidden, weight)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
    gradients = torch.ops.train_entry.column_linear_backward(
        gradient, *ctx.saved_tensors, ctx.sequence_parallel, ctx.group
    )
    return *gradients, None, None


column_linear.register_autograd(_backward, setup_context=_remember)


def _gather(hidden: Tensor, group: str) -> tuple[Tensor, Any]:
    """The tokens of all ranks, which are on their way."""
    ranks = _ranks(group)
    whole = hidden.new_empty(ranks.size() * len(hidden), *hidden.shape[1:])
    return whole, dist.all_gather_into_tensor(whole, hidden.contiguous(), group=ranks, async_op=True)


def _ranks(group: str) -> dist.ProcessGroup:
    """A group by its name, which is all that an operation of a graph can be given."""
    ranks: dist.ProcessGroup = _resolve_process_group(cast(Any, group))
    return ranks
