"""Persimmon: LayerNorms, also of queries and keys, biases, an MLP with squared ReLU, partial rotation of heads."""

from converters import llama
from mcore_convert.spec import ConfigMapping, Family, column, replicated, row, vary
from mcore_convert.spec.config.fields import constant, only, same, shared_heads, ungrouped, written
from mcore_convert.spec.config.rope import rope

CONFIG = ConfigMapping(
    "persimmon",
    ("PersimmonForCausalLM",),
    vary.fields(
        llama.SHARED,
        same("layer_norm_eps", "layernorm_epsilon", kind=float, default=1e-5),
        shared_heads(),
        ungrouped(),
        rope(percent=0.5),
        only("hidden_act", "relu2"),
        only("qk_layernorm", True),
        constant(normalization="LayerNorm", position_embedding_type="rope", add_bias_linear=True),
        constant(squared_relu=True, swiglu=False, qk_layernorm=True),
        written(add_qkv_bias=True),  # since 0.13, add_bias_linear implies it in Megatron-LM
        same("hidden_dropout", "hidden_dropout", kind=float, default=0.0),
        vocab_size=262144,
        intermediate_size=16384,
        num_hidden_layers=36,
        num_attention_heads=64,
        max_position_embeddings=16384,
    ),
)
M, H = llama.M, llama.H
ROWS = vary.weights(
    llama.WITHOUT_BIAS,
    # stored head by head, which is Megatron's order if each head has its own keys and values
    column(M + "self_attention.linear_qkv.weight", "qkv hidden", H + "self_attn.query_key_value.weight"),
    replicated(M + "self_attention.q_layernorm.weight", "head", H + "self_attn.q_layernorm.weight"),
    replicated(M + "self_attention.k_layernorm.weight", "head", H + "self_attn.k_layernorm.weight"),
    row(M + "self_attention.linear_proj.weight", "hidden heads", H + "self_attn.dense.weight"),
    column(M + "mlp.linear_fc1.weight", "ffn hidden", H + "mlp.dense_h_to_4h.weight"),
    row(M + "mlp.linear_fc2.weight", "hidden ffn", H + "mlp.dense_4h_to_h.weight"),
    replicated("decoder.final_layernorm.weight", "hidden", "model.final_layernorm.weight"),
    after=M + "self_attention.linear_qkv.weight",
)
FAMILY = Family("persimmon", ("PersimmonForCausalLM",), CONFIG, vary.with_biases(ROWS, "linear", "norm"), prevalence=4)
