"""Qwen3: Llama with norms of each query and key head, and a head size independent of the hidden size."""

from converters import llama
from mcore_convert.spec import ConfigMapping, Family, replicated, vary
from mcore_convert.spec.config.fields import constant, only, optional_window

CONFIG = ConfigMapping(
    "qwen3",
    ("Qwen3ForCausalLM",),
    vary.fields(
        llama.SHARED,
        constant(qk_layernorm=True, add_qkv_bias=False),
        only("attention_bias", False),
        optional_window(),
        vocab_size=151936,
        intermediate_size=22016,
        num_key_value_heads=32,
        head_dim=128,
        max_position_embeddings=32768,
    ),
)
M, H = llama.M + "self_attention.", llama.H + "self_attn."
NORMS = (
    replicated(M + "q_layernorm.weight", "head", H + "q_norm.weight"),
    replicated(M + "k_layernorm.weight", "head", H + "k_norm.weight"),
)
WEIGHTS = vary.weights(llama.WITHOUT_BIAS, *NORMS, after=M + "linear_qkv.weight")
FAMILY = Family("qwen3", ("Qwen3ForCausalLM",), CONFIG, WEIGHTS, prevalence=70)
