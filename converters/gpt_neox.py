"""GPT-NeoX without parallel residuals (RedPajama-INCITE, rinna, ...): LayerNorms, biases, partial rotation of heads."""

from converters import llama
from mcore_convert.spec import ConfigMapping, Family, column, replicated, row, vary, vocab
from mcore_convert.spec.config.fields import constant, gelu, inert, only, same, shared_heads, ungrouped, written
from mcore_convert.spec.config.rope import rope

CONFIG = ConfigMapping(
    "gpt_neox",
    ("GPTNeoXForCausalLM",),
    vary.fields(
        llama.SHARED,
        same("layer_norm_eps", "layernorm_epsilon", kind=float, default=1e-5),
        shared_heads(),
        ungrouped(),
        rope(percent=0.25, keys=("rotary_emb_base", "rotary_pct")),
        gelu("hidden_act", default="gelu"),
        only("use_parallel_residual", False, default=True),
        only("attention_bias", True),
        constant(normalization="LayerNorm", position_embedding_type="rope", swiglu=False, add_bias_linear=True),
        written(add_qkv_bias=True),  # since 0.13, add_bias_linear implies it in Megatron-LM
        same("hidden_dropout", "hidden_dropout", kind=float, default=0.0),
        inert(classifier_dropout=0.1),  # of another class
        vocab_size=50432,
        hidden_size=6144,
        intermediate_size=24576,
        num_hidden_layers=44,
        num_attention_heads=64,
    ),
)
M, H = llama.M, "gpt_neox.layers.{layer}."
ROWS = (
    vocab("embedding.word_embeddings.weight", "vocab hidden", "gpt_neox.embed_in.weight"),
    replicated(M + "self_attention.linear_qkv.layer_norm_weight", "hidden", H + "input_layernorm.weight"),
    # stored head by head, which is Megatron's order if each head has its own keys and values
    column(M + "self_attention.linear_qkv.weight", "qkv hidden", H + "attention.query_key_value.weight"),
    row(M + "self_attention.linear_proj.weight", "hidden heads", H + "attention.dense.weight"),
    replicated(M + "mlp.linear_fc1.layer_norm_weight", "hidden", H + "post_attention_layernorm.weight"),
    column(M + "mlp.linear_fc1.weight", "ffn hidden", H + "mlp.dense_h_to_4h.weight"),
    row(M + "mlp.linear_fc2.weight", "hidden ffn", H + "mlp.dense_4h_to_h.weight"),
    replicated("decoder.final_layernorm.weight", "hidden", "gpt_neox.final_layer_norm.weight"),
    vocab("output_layer.weight", "vocab hidden", "embed_out.weight", when=lambda dims: not dims.tied),
)
FAMILY = Family(
    "gpt_neox",
    ("GPTNeoXForCausalLM",),
    CONFIG,
    vary.with_biases(ROWS, "linear", "norm"),
    ignore=tuple(H + "attention." + name for name in ("bias", "masked_bias", "rotary_emb.inv_freq")),
    prevalence=45,
)
