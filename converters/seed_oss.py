"""Seed-OSS: Llama with biases on q, k and v, and with dropout."""

from converters import llama
from mcore_convert.spec import ConfigMapping, Family, vary
from mcore_convert.spec.config.fields import inert, only, same

CONFIG = ConfigMapping(
    "seed_oss",
    ("SeedOssForCausalLM",),
    vary.fields(
        llama.SHARED,
        same("attention_bias", "add_qkv_bias", kind=bool, default=True),  # of q, k and v only
        only("attention_out_bias", False),
        only("mlp_bias", False),
        same("residual_dropout", "hidden_dropout", kind=float, default=0.1),
        inert(pretraining_tp=1),
        vocab_size=155136,
        intermediate_size=27648,
        num_hidden_layers=64,
        num_attention_heads=80,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=524288,
        attention_dropout=0.1,
    ),
)
FAMILY = Family("seed_oss", ("SeedOssForCausalLM",), CONFIG, llama.WITH_QKV_BIAS, prevalence=15)
