"""Helium: Llama with rotation of neighbouring channels."""

from converters import llama
from mcore_convert.spec import ConfigMapping, Family, vary
from mcore_convert.spec.config.fields import constant, only, same
from mcore_convert.spec.config.rope import rope

CONFIG = ConfigMapping(
    "helium",
    ("HeliumForCausalLM",),
    vary.fields(
        llama.SHARED,
        rope(theta=100000.0),
        constant(rotary_interleaved=True),
        same("attention_bias", "add_qkv_bias", kind=bool, default=False),  # of q, k and v only
        only("mlp_bias", False),
        vocab_size=48000,
        hidden_size=2560,
        intermediate_size=7040,
        num_hidden_layers=24,
        num_attention_heads=20,
        num_key_value_heads=20,
        head_dim=128,
        max_position_embeddings=4096,
        rms_norm_eps=1e-8,
    ),
)
FAMILY = Family("helium", ("HeliumForCausalLM",), CONFIG, llama.WITH_QKV_BIAS, prevalence=10)
