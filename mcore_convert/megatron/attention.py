"""Megatron Core's plain attention with values of a different width than keys, for latent attention."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.dot_product_attention import DotProductAttention


class LatentDotProductAttention(DotProductAttention):
    """Dot product attention whose widths are arguments, as only Transformer Engine's attention has them.

    The defaults are the width of a head. A layer makes this module twice, and passes the widths the second time
    only. From Megatron Core 0.16.1: `multi_latent_attention.py`, `attention.py` and `dot_product_attention.py`.
    """

    def __init__(
        self, config: Any, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **options: Any
    ) -> None:
        super().__init__(config, *args, **options)
        if k_channels is not None and v_channels is not None:
            self.hidden_size_per_attention_head = k_channels
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition
