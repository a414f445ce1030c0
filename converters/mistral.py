"""Mistral: Llama without biases, and with an attention window."""

from converters import llama
from mcore_convert.spec import ConfigMapping, Family, vary
from mcore_convert.spec.config.fields import constant, sliding_window

CONFIG = ConfigMapping(
    "mistral",
    ("MistralForCausalLM",),
    vary.fields(
        llama.SHARED,
        sliding_window(default=4096),
        constant(add_qkv_bias=False),
        intermediate_size=14336,
        num_key_value_heads=8,
        max_position_embeddings=131072,
    ),
)
FAMILY = Family("mistral", ("MistralForCausalLM",), CONFIG, llama.WITHOUT_BIAS, prevalence=80)
