"""GLM-4 of 9B and GLM-Edge: Llama with gate and up in one tensor, and partial rotation of neighbouring channels."""

from converters import llama
from mcore_convert.spec import ConfigMapping, Family, gated_column, vary
from mcore_convert.spec.config.fields import constant, same
from mcore_convert.spec.config.rope import rope

CONFIG = ConfigMapping(
    "glm",
    ("GlmForCausalLM",),
    vary.fields(
        llama.SHARED,
        rope(percent=0.5),
        constant(rotary_interleaved=True),
        same("attention_bias", "add_qkv_bias", kind=bool, default=True),  # of q, k and v only
        vocab_size=151552,
        intermediate_size=13696,
        num_hidden_layers=40,
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=131072,
        rms_norm_eps=1.5625e-7,
    ),
)
FC1 = gated_column(llama.M + "mlp.linear_fc1.weight", "gated_ffn hidden", llama.H + "mlp.gate_up_proj.weight")
FAMILY = Family("glm", ("GlmForCausalLM",), CONFIG, vary.weights(llama.WITH_QKV_BIAS, FC1), prevalence=35)
