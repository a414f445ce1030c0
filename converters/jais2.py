"""Jais 2: Llama's attention with LayerNorms, biases in all linear layers, an MLP with squared ReLU."""

from converters import llama
from mcore_convert.spec import ConfigMapping, Family, column, vary
from mcore_convert.spec.config.fields import constant, only, same, written

CONFIG = ConfigMapping(
    "jais2",
    ("Jais2ForCausalLM",),
    vary.fields(
        llama.SHARED,
        same("layer_norm_eps", "layernorm_epsilon", kind=float, default=1e-5),
        only("hidden_act", "relu2"),
        constant(normalization="LayerNorm", position_embedding_type="rope", add_bias_linear=True),
        constant(squared_relu=True, swiglu=False),
        written(add_qkv_bias=True),  # since 0.13, add_bias_linear implies it in Megatron-LM
        only("attention_bias", True),
        only("mlp_bias", True),
        vocab_size=150272,
        hidden_size=3328,
        intermediate_size=26624,
        num_attention_heads=26,
        max_position_embeddings=8192,
    ),
)
UP = column(llama.M + "mlp.linear_fc1.weight", "ffn hidden", llama.H + "mlp.up_proj.weight")
WEIGHTS = vary.with_biases(vary.weights(llama.WITHOUT_BIAS, UP), "linear", "norm")
FAMILY = Family("jais2", ("Jais2ForCausalLM",), CONFIG, WEIGHTS, prevalence=5)
