"""Mixtures of experts for the benchmarks, in the shape of Qwen3-MoE: one tensor for each matrix of each expert."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.checkpoints import llama_shapes, make_hf, nbytes_of

# Qwen3-235B-A22B: in transformers 4's spelling, as on the Hub.
QWEN3_235B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 94,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 1536,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 94,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


# 1.9 GB in 9,600 tensors, most of them of 197 kB, which shows the cost per tensor.
SMALL_EXPERTS: dict[str, Any] = QWEN3_235B | {
    "head_dim": 64,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "max_window_layers": 24,
    "moe_intermediate_size": 128,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "vocab_size": 32000,
}


def qwen3_moe_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor of a Qwen3-MoE's Hugging Face checkpoint."""
    hidden, head, ffn = config["hidden_size"], config["head_dim"], config["moe_intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in llama_shapes(config).items():
        if ".mlp." not in name:
            shapes[name] = shape
        elif name.endswith(".mlp.gate_proj.weight"):  # in place of the dense layer's
            layer = name.removesuffix("mlp.gate_proj.weight")
            shapes |= {f"{layer}self_attn.{x}_norm.weight": (head,) for x in "qk"}
            shapes[f"{layer}mlp.gate.weight"] = (config["num_experts"], hidden)
            for expert in range(config["num_experts"]):
                of_expert = {"gate_proj": (ffn, hidden), "up_proj": (ffn, hidden), "down_proj": (hidden, ffn)}
                shapes |= {f"{layer}mlp.experts.{expert}.{x}.weight": of_expert[x] for x in of_expert}
    return shapes


def qwen3_moe_nbytes(config: dict[str, Any]) -> int:
    """Return the bytes of all tensors in bfloat16."""
    return sum(map(nbytes_of, qwen3_moe_shapes(config).values()))


def make_qwen3_moe(path: Path, config: dict[str, Any], *, shards: int, sparse: bool = False) -> Path:
    """Write a bfloat16 Qwen3-MoE as a Hugging Face directory."""
    return make_hf(path, config, qwen3_moe_shapes(config), shards=shards, sparse=sparse)
