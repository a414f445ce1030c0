"""Megatron's transformer layers: with attention over torch's kernels, and of parts that compile as one graph."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from mcore_convert.megatron.model import local_block_spec
from train_entry.model.attention import SdpaAttention
from train_entry.model.operations import column_linear, sum_of_ranks, swiglu

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules


def sdpa_spec(config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Return Megatron's local layers, with attention over torch's kernels."""
    block = local_block_spec(config, vp_stage)
    for layer in block.layer_specs or ():
        layer.submodules.self_attention.submodules.core_attention = SdpaAttention
    return block


def graph_spec(config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Return the same spec with modules that compile as one graph, for a `model_class` with rotary tables."""
    column, row, attention = _graph_modules()
    block = sdpa_spec(config, vp_stage)
    for layer in block.layer_specs or ():
        layer.submodules.self_attention.module = attention
        layer.submodules.self_attention.submodules.linear_qkv = column
        layer.submodules.self_attention.submodules.linear_proj = row
        layer.submodules.mlp.submodules.linear_fc1 = column
        layer.submodules.mlp.submodules.linear_fc2 = row
        if config.use_te_activation_func:  # requested by `settings`: an activation that is not torch's
            layer.submodules.mlp.submodules.activation_func = swiglu
    return block


def graph_settings(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `TransformerConfig` that `graph_spec` requires."""
    return {"use_te_activation_func": bool(args.get("swiglu"))}


def rotate(heads: Tensor, tables: Tensor, *, interleaved: bool) -> Tensor:
    """Rotate the first channels of `[tokens, samples, groups, heads, channels]` by their positions, in fp32.

    Megatron's own function first rounds cosines and sines to the model's precision, and concatenates halves twice.

    Args:
        tables: cosines and sines, `[2, tokens, 1, 1, rotated channels]`.
    """
    tables = tables.unsqueeze(-2)
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
    """Return the classes, defined once Megatron Core is imported."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.attention import SelfAttention

    class GraphColumnParallelLinear(ColumnParallelLinear):
        """Megatron's column-parallel linear layer, its communication and products overlapped in one operation."""

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
            product: Tensor = column_linear(input, weight, sequence_parallel, self.tp_group.group_name)
            return product if bias is None else product + bias

    class GraphRowParallelLinear(RowParallelLinear):
        """Megatron's row-parallel linear layer over inputs that are split already, its communication one operation."""

        def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
            product = functional.linear(input_, self.weight)
            if self.tp_group.size() > 1:
                product = sum_of_ranks(product, self.sequence_parallel, self.tp_group.group_name)
            return product, self.bias  # added with the residual

    class GraphSelfAttention(SelfAttention):
        """The part of Megatron's self-attention that training uses, with cosines and sines from tables."""

        def forward(
            self, hidden_states: Tensor, attention_mask: Tensor | None, rotary_pos_emb: Tensor | None = None, **_: Any
        ) -> tuple[Tensor, Tensor | None]:
            query, key, value = self._heads(hidden_states)
            if rotary_pos_emb is not None:
                interleaved = self.config.rotary_interleaved
                query, key = (rotate(each, rotary_pos_emb, interleaved=interleaved) for each in (query, key))
            query, key, value = (each.flatten(2, 3) for each in (query, key, value))
            attended = self.core_attention(query, key, value, attention_mask, attn_mask_type=self.attn_mask_type)
            output, bias = self.linear_proj(attended)
            return output, bias

        def _heads(self, hidden: Tensor) -> tuple[Tensor, ...]:
            """Return query, key and value, `[tokens, samples, groups, heads of a group, channels]`.

            Megatron's own code merges groups and heads at once, which costs a division per element when compiled.
            """
            groups = self.num_query_groups_per_partition
            if self.config.num_query_groups < self.world_size:  # a group is split over ranks
                return tuple(each.unsqueeze(2) for each in self.get_query_key_value_tensors(hidden))
            mixed, _ = self.linear_qkv(hidden)
            each = self.num_attention_heads_per_partition // groups
            query, key, value = mixed.unflatten(-1, (groups, each + 2, -1)).split((each, 1, 1), 3)
            query = query if self.q_layernorm is None else self.q_layernorm(query)
            return query, key if self.k_layernorm is None else self.k_layernorm(key), value

    return GraphColumnParallelLinear, GraphRowParallelLinear, GraphSelfAttention
