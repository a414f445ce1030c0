"""DeepSeek-V3 for the benchmarks of planning: 61 layers of 256 experts and a predicting layer, in bf16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.checkpoints import make_hf, nbytes_of

# As on the Hub, without the scales of its fp8.
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "aux_loss_alpha": 0.001,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "pretraining_tp": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}

# Kimi K2, 1 trillion parameters: the same modules in other sizes, without layers that predict further tokens.
KIMI_K2: dict[str, Any] = DEEPSEEK_V3 | {
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
    "model_type": "kimi_k2",
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "rope_scaling": DEEPSEEK_V3["rope_scaling"] | {"beta_fast": 1, "beta_slow": 1, "factor": 32},
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "topk_group": 1,
    "vocab_size": 163840,
}
BLOCK = 128  # rows and columns per scale
FP8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [BLOCK, BLOCK],
}
NOT_LINEAR = ("norm", "embed_tokens", "lm_head", "mlp.gate.", "shared_head", "eh_proj")  # these stay in bfloat16

Shapes = dict[str, tuple[int, ...]]


def deepseek_shapes(config: dict[str, Any]) -> Shapes:
    """Return name and shape of every tensor of a DeepSeek-V3's Hugging Face checkpoint."""
    hidden, vocab, layers = config["hidden_size"], config["vocab_size"], config["num_hidden_layers"]
    shapes: Shapes = {"model.embed_tokens.weight": (vocab, hidden)}
    for number in range(layers + config["num_nextn_predict_layers"]):
        layer = f"model.layers.{number}."
        has_experts = number >= config["first_k_dense_replace"]
        shapes |= {layer + name: shape for name, shape in _layer(config, has_experts=has_experts).items()}
        if number >= layers:
            shapes |= {f"{layer}{name}.weight": (hidden,) for name in ("enorm", "hnorm", "shared_head.norm")}
            shapes |= {f"{layer}{name}.weight": (vocab, hidden) for name in ("embed_tokens", "shared_head.head")}
            shapes[f"{layer}eh_proj.weight"] = (hidden, 2 * hidden)
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}


def _layer(config: dict[str, Any], *, has_experts: bool) -> Shapes:
    hidden, heads, queries, kv = (
        config[name] for name in ("hidden_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank")
    )
    plain, rotary, values = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    shapes: Shapes = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_a_proj.weight": (queries, hidden),
        "self_attn.q_a_layernorm.weight": (queries,),
        "self_attn.q_b_proj.weight": (heads * (plain + rotary), queries),
        "self_attn.kv_a_proj_with_mqa.weight": (kv + rotary, hidden),
        "self_attn.kv_a_layernorm.weight": (kv,),
        "self_attn.kv_b_proj.weight": (heads * (plain + values), kv),
        "self_attn.o_proj.weight": (hidden, heads * values),
    }
    if not has_experts:
        return shapes | _mlp("mlp.", hidden, config["intermediate_size"])
    count, size = config["n_routed_experts"], config["moe_intermediate_size"]
    shapes |= {"mlp.gate.weight": (count, hidden), "mlp.gate.e_score_correction_bias": (count,)}
    shapes |= _mlp("mlp.shared_experts.", hidden, size * config["n_shared_experts"])
    for expert in range(count):
        shapes |= _mlp(f"mlp.experts.{expert}.", hidden, size)
    return shapes


def _mlp(prefix: str, hidden: int, size: int) -> Shapes:
    return {
        f"{prefix}gate_proj.weight": (size, hidden),
        f"{prefix}up_proj.weight": (size, hidden),
        f"{prefix}down_proj.weight": (hidden, size),
    }


def deepseek_nbytes(config: dict[str, Any]) -> int:
    """Return the bytes of all tensors in bfloat16."""
    return sum(map(nbytes_of, deepseek_shapes(config).values()))


def make_deepseek(path: Path, config: dict[str, Any], *, shards: int) -> Path:
    """Write a DeepSeek-V3 as a Hugging Face directory with holes for its values."""
    return make_hf(path, config, deepseek_shapes(config), shards=shards, sparse=True)


def make_fp8(path: Path, config: dict[str, Any], *, shards: int) -> Path:
    """Write the same model in the form of the Hub: linear layers in fp8, with a scale per block."""
    shapes: Shapes = {}
    codes: dict[str, str] = {}
    for name, shape in deepseek_shapes(config).items():
        shapes[name] = shape
        if len(shape) == 2 and not any(part in name for part in NOT_LINEAR):
            scales = f"{name}_scale_inv"
            shapes[scales] = (-(-shape[0] // BLOCK), -(-shape[1] // BLOCK))
            codes |= {name: "F8_E4M3", scales: "F32"}
    quantised = config | {"quantization_config": FP8}
    return make_hf(path, quantised, shapes, shards=shards, sparse=True, codes=codes)
