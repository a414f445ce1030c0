"""The dense ERNIE 4.5: Llama with rotation of neighbouring channels."""

from converters import llama
from mcore_convert.spec import ConfigMapping, Family, vary
from mcore_convert.spec.config.fields import constant, only
from mcore_convert.spec.config.rope import rope

CONFIG = ConfigMapping(
    "ernie4_5",
    ("Ernie4_5ForCausalLM",),
    vary.fields(
        llama.SHARED,
        rope(theta=500000.0),
        constant(rotary_interleaved=True, add_qkv_bias=False),
        only("use_bias", False),
        vocab_size=103424,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=18,
        num_attention_heads=16,
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    ),
)
FAMILY = Family("ernie4_5", ("Ernie4_5ForCausalLM",), CONFIG, llama.WITHOUT_BIAS, prevalence=30)
