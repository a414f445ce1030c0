"""Nemotron 3 and 4, and Minitron: LayerNorms stored minus one, an MLP with squared ReLU, partial rotation of heads."""

from converters import llama
from mcore_convert.spec import ConfigMapping, Family, column, vary
from mcore_convert.spec.config.fields import constant, only, same
from mcore_convert.spec.config.rope import rope

CONFIG = ConfigMapping(
    "nemotron",
    ("NemotronForCausalLM",),
    vary.fields(
        llama.SHARED,
        same("norm_eps", "layernorm_epsilon", kind=float, default=1e-5),
        rope(percent=0.5),
        only("hidden_act", "relu2"),
        # both sides store the weight of a norm minus one, so nothing is added
        constant(normalization="LayerNorm", layernorm_zero_centered_gamma=True),
        constant(position_embedding_type="rope", squared_relu=True, swiglu=False),
        constant(add_bias_linear=False, add_qkv_bias=False),
        only("attention_bias", False),
        only("mlp_bias", False),
        vocab_size=256000,
        hidden_size=6144,
        intermediate_size=24576,
        num_attention_heads=48,
        max_position_embeddings=4096,
    ),
)
UP = column(llama.M + "mlp.linear_fc1.weight", "ffn hidden", llama.H + "mlp.up_proj.weight")
WEIGHTS = vary.with_biases(vary.weights(llama.WITHOUT_BIAS, UP), "norm")
FAMILY = Family("nemotron", ("NemotronForCausalLM",), CONFIG, WEIGHTS, prevalence=27)
