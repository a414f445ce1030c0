"""StarCoder2: Llama's attention with LayerNorms, biases in all linear layers, an MLP without a gate."""

from converters import llama
from mcore_convert.spec import ConfigMapping, Family, column, row, vary
from mcore_convert.spec.config.fields import constant, gelu, inert, only, same, shared_heads, sliding_window, written

CONFIG = ConfigMapping(
    "starcoder2",
    ("Starcoder2ForCausalLM",),
    vary.fields(
        llama.SHARED,
        same("norm_epsilon", "layernorm_epsilon", kind=float, default=1e-5),
        gelu("hidden_act", default="gelu_pytorch_tanh"),
        shared_heads(),
        sliding_window(default=None),
        only("use_bias", True),
        constant(normalization="LayerNorm", position_embedding_type="rope", swiglu=False, add_bias_linear=True),
        written(add_qkv_bias=True),  # since 0.13, add_bias_linear implies it in Megatron-LM
        same("residual_dropout", "hidden_dropout", kind=float, default=0.0),
        inert(embedding_dropout=0.0),  # Megatron has one dropout for both
        vocab_size=49152,
        hidden_size=3072,
        intermediate_size=12288,
        num_hidden_layers=30,
        num_attention_heads=24,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    ),
)
M, H = llama.M, llama.H
ROWS = vary.weights(
    llama.WITHOUT_BIAS,
    column(M + "mlp.linear_fc1.weight", "ffn hidden", H + "mlp.c_fc.weight"),
    row(M + "mlp.linear_fc2.weight", "hidden ffn", H + "mlp.c_proj.weight"),
)
FAMILY = Family(
    "starcoder2", ("Starcoder2ForCausalLM",), CONFIG, vary.with_biases(ROWS, "linear", "norm"), prevalence=50
)
