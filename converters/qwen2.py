"""Qwen2 and Qwen2.5: Llama with biases on q, k and v. A window is refused unless it is off or covers every position."""

from converters import llama
from mcore_convert.spec import ConfigMapping, Family, vary
from mcore_convert.spec.fields import constant, optional_window

CONFIG = ConfigMapping(
    "qwen2",
    ("Qwen2ForCausalLM",),
    vary.fields(
        llama.SHARED,
        constant(add_qkv_bias=True),
        optional_window(),
        vocab_size=151936,
        intermediate_size=22016,
        num_key_value_heads=32,
        max_position_embeddings=32768,
    ),
)
FAMILY = Family("qwen2", ("Qwen2ForCausalLM",), CONFIG, llama.WITH_QKV_BIAS, prevalence=90)
