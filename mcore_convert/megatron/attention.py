"""Megatron Core's plain attention with values of another width than keys, as latent attention has them."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.dot_product_attention import DotProductAttention


class LatentDotProductAttention(DotProductAttention):
    """The widths are arguments of Transformer Engine's attention alone; here they are those of a head without them.

    They are given in the second of two times that a layer makes this module. From Megatron Core 0.16.1,
    `multi_latent_attention.py`, `attention.py` and `dot_product_attention.py`.
    """

    def __init__(
        self, config: Any, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **options: Any
    ) -> None:
        super().__init__(config, *args, **options)
        if k_channels is not None and v_channels is not None:
            self.hidden_size_per_attention_head = k_channels
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition
