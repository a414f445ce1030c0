"""GPT-2: LayerNorm, learned positions, biases everywhere, gelu, `Conv1D` weights stored transposed."""

from typing import Any

from mcore_convert.spec import QKV, ConfigMapping, Family, Fused, Transposed, column, replicated, row, vocab
from mcore_convert.spec.config.fields import (
    blank,
    constant,
    dtype,
    gelu,
    inert,
    negated,
    only,
    same,
    stated,
    unused,
    vocabulary,
    written,
)
from mcore_convert.spec.config.mapping import Field, Refused, Values


def heads() -> Field:
    """Return the field of heads that divide the hidden size, with as many key and value heads as query heads."""

    def to_megatron(config: Values) -> dict[str, Any]:
        hidden, count = config["n_embd"], config["n_head"]
        if not isinstance(hidden, int) or not isinstance(count, int) or count < 1 or hidden % count:
            raise Refused(f"`n_embd` = {hidden} is not a multiple of `n_head` = {count}")
        return {
            "num_attention_heads": count,
            "num_query_groups": count,
            "group_query_attention": False,
            "kv_channels": hidden // count,
        }

    def to_hf(args: Values) -> dict[str, Any]:
        expected = to_megatron({"n_embd": stated(args, "hidden_size"), "n_head": stated(args, "num_attention_heads")})
        names = ("num_query_groups", "kv_channels")
        wrong = [name for name in names if args.get(name, expected[name]) != expected[name]]
        if wrong:
            raise Refused(*(f"`{name}` = {args[name]}, the family has {expected[name]}" for name in wrong))
        return {"n_head": expected["num_attention_heads"]}

    names = ("num_attention_heads", "num_query_groups", "group_query_attention", "kv_channels")
    return Field({"n_head": 12}, names, to_megatron, to_hf)


def inner() -> Field:
    """Return the field of the intermediate size of the MLP; `null` is four times the hidden size,
    and that size is written as `null`.
    """
    size = same("n_inner", "ffn_hidden_size", default=None, null=lambda config: 4 * config["n_embd"])

    def to_hf(args: Values) -> dict[str, Any]:
        config = size.to_hf(args)
        return {"n_inner": None} if config["n_inner"] == 4 * stated(args, "hidden_size") else config

    return Field(size.hf, size.megatron, size.to_megatron, to_hf)


def dropout() -> Field:
    """Return the field of dropout of residuals and embeddings. Megatron has one number: that of residuals is used."""
    residual = same("resid_pdrop", "hidden_dropout", kind=float, default=0.1)

    def to_hf(args: Values) -> dict[str, Any]:
        config = residual.to_hf(args)
        return {**config, "embd_pdrop": config["resid_pdrop"]}

    return Field({"resid_pdrop": 0.1, "embd_pdrop": 0.1}, residual.megatron, residual.to_megatron, to_hf)


CONFIG = ConfigMapping(
    "gpt2",
    ("GPT2LMHeadModel",),
    (
        vocabulary(default=50257),
        same("n_positions", "max_position_embeddings", default=1024),
        same("n_embd", "hidden_size", default=768),
        same("n_layer", "num_layers", default=12),
        heads(),
        inner(),
        gelu("activation_function", default="gelu_new"),
        dropout(),
        same("attn_pdrop", "attention_dropout", kind=float, default=0.1),
        same("layer_norm_epsilon", "layernorm_epsilon", kind=float, default=1e-5),
        only("scale_attn_weights", True),
        only("scale_attn_by_inverse_layer_idx", False),
        only("add_cross_attention", False),
        negated("tie_word_embeddings", "untie_embeddings_and_output_weights", default=True),
        inert(n_ctx=1024, reorder_and_upcast_attn=False),  # a former name of n_positions; precision
        inert(summary_type=None, summary_use_proj=None, summary_activation=None, summary_proj_to_labels=None),
        inert(summary_first_dropout=None),  # the head of another class
        constant(normalization="LayerNorm", position_embedding_type="learned_absolute", swiglu=False),
        constant(add_bias_linear=True),
        written(add_qkv_bias=True),  # since 0.13, add_bias_linear implies it in Megatron-LM
        unused("rotary_percent", "rotary_interleaved", "rotary_seq_len_interpolation_factor", "use_rope_scaling"),
        unused("no_rope_freq", "rope_type", "mrope_section"),
        blank("bos_token_id", "eos_token_id"),
        dtype(),
    ),
)

M, H = "decoder.layers.{layer}.", "transformer.h.{layer}."
FAMILY = Family(
    name="gpt2",
    architectures=("GPT2LMHeadModel",),
    config=CONFIG,
    weights=(
        vocab("embedding.word_embeddings.weight", "vocab hidden", "transformer.wte.weight"),
        replicated("embedding.position_embeddings.weight", "positions hidden", "transformer.wpe.weight"),
        replicated(M + "self_attention.linear_qkv.layer_norm_weight", "hidden", H + "ln_1.weight"),
        replicated(M + "self_attention.linear_qkv.layer_norm_bias", "hidden", H + "ln_1.bias"),
        column(
            M + "self_attention.linear_qkv.weight",
            "qkv hidden",
            H + "attn.c_attn.weight",
            pack=Transposed(Fused(QKV())),
        ),
        column(M + "self_attention.linear_qkv.bias", "qkv", H + "attn.c_attn.bias", pack=Fused(QKV())),
        row(M + "self_attention.linear_proj.weight", "hidden heads", H + "attn.c_proj.weight", pack=Transposed()),
        replicated(M + "self_attention.linear_proj.bias", "hidden", H + "attn.c_proj.bias"),
        replicated(M + "mlp.linear_fc1.layer_norm_weight", "hidden", H + "ln_2.weight"),
        replicated(M + "mlp.linear_fc1.layer_norm_bias", "hidden", H + "ln_2.bias"),
        column(M + "mlp.linear_fc1.weight", "ffn hidden", H + "mlp.c_fc.weight", pack=Transposed()),
        column(M + "mlp.linear_fc1.bias", "ffn", H + "mlp.c_fc.bias"),
        row(M + "mlp.linear_fc2.weight", "hidden ffn", H + "mlp.c_proj.weight", pack=Transposed()),
        replicated(M + "mlp.linear_fc2.bias", "hidden", H + "mlp.c_proj.bias"),
        replicated("decoder.final_layernorm.weight", "hidden", "transformer.ln_f.weight"),
        replicated("decoder.final_layernorm.bias", "hidden", "transformer.ln_f.bias"),
        vocab("output_layer.weight", "vocab hidden", "lm_head.weight", when=lambda dims: not dims.tied),
    ),
    ignore=(H + "attn.bias", H + "attn.masked_bias"),
    optional_prefix="transformer.",
    prevalence=99,
)
