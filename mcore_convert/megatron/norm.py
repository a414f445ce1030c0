"""LayerNorm and RMSNorm for Megatron Core's local layer spec, with weights around one or around zero."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional


class Norm(torch.nn.Module):
    """Norm that a `TransformerConfig` names, over the last dimension.

    Megatron's own fallback without Apex and Transformer Engine refuses `layernorm_zero_centered_gamma`, where the
    stored weight is the true one minus 1, and sequence parallelism, where each rank norms its own tokens: Megatron's
    `finalize_model_grads` then sums the gradients of parameters marked `sequence_parallel`. The parameters have the
    same names as there: `weight`, and `bias` for LayerNorm.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.offset = 1.0 if config.layernorm_zero_centered_gamma else 0.0
        self.weight = torch.nn.Parameter(torch.full((hidden_size,), 1.0 - self.offset))
        self.bias: torch.nn.Parameter | None
        if config.normalization == "LayerNorm":
            self.bias = torch.nn.Parameter(torch.zeros(hidden_size))
        else:
            self.register_parameter("bias", None)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weight = self.weight + self.offset if self.offset else self.weight
        if self.bias is None:
            return functional.rms_norm(hidden, weight.shape, weight, self.eps)
        return functional.layer_norm(hidden, weight.shape, weight, self.bias, self.eps)
