"""Floating-point operations of training, as Megatron-LM counts them, and how well they use a device.

The count is that of `num_floating_point_operations` in `megatron/training/training.py` at `core_v0.16.1`: only matrix
products, forward and backward; half of the attention, since the other half is masked; the output layer with its
padding; no recomputation. So `tflops` here and `throughput per GPU` there are the same number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcore_convert.spec.config.arguments import normalise

# A token costs a multiplication and an addition for each element of a matrix: once in the forward pass, and
# twice in the backward pass, for the gradients of the input and of the matrix.
FLOPS_PER_ELEMENT = 2 * 3


def flops_per_token(args: Mapping[str, Any], seq_length: int | None = None) -> int:
    """Return the average operations per token, over all devices.

    Args:
        args: Megatron-LM's arguments of a GPT, including `padded_vocab_size`.
        seq_length: tokens per sample; that of the arguments unless given.
    """
    full = normalise(args)
    length = seq_length or full["seq_length"]
    hidden, queries = full["hidden_size"], full["kv_channels"] * full["num_attention_heads"]
    keys = full["kv_channels"] * full["num_query_groups"]
    attention = hidden * (queries + 2 * keys) + queries * hidden
    # scores and their product with the values: each `queries` wide per previous token, which are half of all on average
    attention += 2 * queries * length // 2
    elements = full["num_layers"] * attention + _mlp(full) + hidden * full["padded_vocab_size"]
    return int(FLOPS_PER_ELEMENT * elements)


def _mlp(args: Mapping[str, Any]) -> int:
    """Return the elements of the matrices that a token passes in the MLPs of all layers."""
    matrices = 3 if args["swiglu"] else 2
    wide, layers = args["ffn_hidden_size"], args["num_layers"]
    if not args.get("num_experts"):
        return int(layers * matrices * args["hidden_size"] * wide)
    frequency = args.get("moe_layer_freq") or 1  # the interval of expert layers, or a pattern of ones and zeros
    pattern = [i % frequency == 0 for i in range(layers)] if isinstance(frequency, int) else frequency
    sparse = sum(map(int, pattern))
    routed = (args.get("moe_ffn_hidden_size") or wide) * args["moe_router_topk"]
    shared = args.get("moe_shared_expert_intermediate_size") or 0
    return int(matrices * args["hidden_size"] * (sparse * (routed + shared) + (layers - sparse) * wide))


def mfu(tflops: float, peak: float | None) -> float | None:
    """Return the model FLOPs utilisation: the share of a device's peak that a run reaches; None if it is unknown."""
    return None if peak is None else tflops / peak
