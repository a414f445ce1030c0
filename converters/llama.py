"""Llama 1 to 3.x and models of other names with the same layers: RMSNorm, rotary positions, GQA, gated MLP."""

from typing import Any

from mcore_convert.spec import (
    QKV,
    Concat,
    ConfigMapping,
    Family,
    column,
    gated_column,
    must_be_zero,
    replicated,
    row,
    vary,
    vocab,
)
from mcore_convert.spec.config.fields import (
    blank,
    constant,
    dtype,
    head_dim,
    negated,
    only,
    query_groups,
    same,
    shared_head_dim,
    unused,
    vocabulary,
    written,
)
from mcore_convert.spec.config.mapping import Field, Refused, Values, shown
from mcore_convert.spec.config.rope import rope

SHARED: tuple[Field, ...] = (
    vocabulary(default=32000),
    same("hidden_size", "hidden_size", default=4096),
    same("intermediate_size", "ffn_hidden_size", default=11008),
    same("num_hidden_layers", "num_layers", default=32),
    same("num_attention_heads", "num_attention_heads", default=32),
    query_groups(),
    head_dim(),
    same("max_position_embeddings", "max_position_embeddings", default=2048),
    same("rms_norm_eps", "layernorm_epsilon", kind=float, default=1e-6),
    rope(),
    only("hidden_act", "silu"),
    same("attention_dropout", "attention_dropout", kind=float, default=0.0),
    negated("tie_word_embeddings", "untie_embeddings_and_output_weights", default=False),
    constant(normalization="RMSNorm", position_embedding_type="rope", swiglu=True, add_bias_linear=False),
    written(hidden_dropout=0.0),
    unused("bias_gelu_fusion", "openai_gelu", "use_te_activation_func"),
    blank("bos_token_id", "eos_token_id", "pad_token_id"),
    dtype(),
)
OWN: tuple[Field, ...] = (
    same("attention_bias", "add_qkv_bias", kind=bool, default=False),  # the bias of o must be zero, see below
    only("mlp_bias", False),
    *SHARED,
)
IQUEST = ConfigMapping(
    "iquestcoder",
    ("IQuestCoderForCausalLM", "LlamaForCausalLM"),  # transformers saves the latter
    vary.fields(
        OWN,
        vocab_size=76800,
        hidden_size=5120,
        intermediate_size=27648,
        num_hidden_layers=80,
        num_attention_heads=40,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
    ),
)
INTERNLM3 = ConfigMapping(
    "internlm3",
    ("InternLM3ForCausalLM", "LlamaForCausalLM"),
    vary.fields(
        OWN,
        only("qkv_bias", False),  # names in the first release
        only("bias", False),
        vocab_size=128512,
        intermediate_size=10240,
        num_hidden_layers=48,
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=32768,
        rms_norm_eps=1e-5,
    ),
)


def attention_multiplier() -> Field:
    """Return the field of Granite's factor on attention scores, which replaces 1 / sqrt(head_dim)."""

    def to_megatron(config: Values) -> dict[str, Any]:
        usual = (config["head_dim"] or shared_head_dim(config)) ** -0.5
        if config["attention_multiplier"] != usual:
            stated = shown(config["attention_multiplier"])
            raise Refused(f"`attention_multiplier` = {stated}, only 1 / sqrt(head_dim) = {usual} can be represented")
        return {}

    return Field({"attention_multiplier": 1.0}, (), to_megatron, lambda _: {})


GRANITE = ConfigMapping(
    "granite",
    ("GraniteForCausalLM",),
    (
        only("embedding_multiplier", 1.0),
        only("residual_multiplier", 1.0),
        only("logits_scaling", 1.0),
        attention_multiplier(),
        *OWN,
    ),
)
CONFIG = ConfigMapping("llama", ("LlamaForCausalLM",), OWN, dialects=(GRANITE, INTERNLM3, IQUEST))

M, H = "decoder.layers.{layer}.", "model.layers.{layer}."
FAMILY = Family(
    name="llama",
    architectures=("LlamaForCausalLM", "GraniteForCausalLM", "InternLM3ForCausalLM", "IQuestCoderForCausalLM"),
    config=CONFIG,
    weights=(
        vocab("embedding.word_embeddings.weight", "vocab hidden", "model.embed_tokens.weight"),
        replicated(M + "self_attention.linear_qkv.layer_norm_weight", "hidden", H + "input_layernorm.weight"),
        column(
            M + "self_attention.linear_qkv.weight",
            "qkv hidden",
            *(H + f"self_attn.{x}_proj.weight" for x in "qkv"),
            pack=QKV(),
        ),
        column(
            M + "self_attention.linear_qkv.bias",
            "qkv",
            *(H + f"self_attn.{x}_proj.bias" for x in "qkv"),
            pack=QKV(),
            when=lambda dims: dims.qkv_bias,
        ),
        row(M + "self_attention.linear_proj.weight", "hidden heads", H + "self_attn.o_proj.weight"),
        must_be_zero(H + "self_attn.o_proj.bias", "hidden", when=lambda dims: dims.qkv_bias),
        replicated(M + "mlp.linear_fc1.layer_norm_weight", "hidden", H + "post_attention_layernorm.weight"),
        gated_column(
            M + "mlp.linear_fc1.weight",
            "gated_ffn hidden",
            H + "mlp.gate_proj.weight",
            H + "mlp.up_proj.weight",
            pack=Concat(),
        ),
        row(M + "mlp.linear_fc2.weight", "hidden ffn", H + "mlp.down_proj.weight"),
        replicated("decoder.final_layernorm.weight", "hidden", "model.norm.weight"),
        vocab("output_layer.weight", "vocab hidden", "lm_head.weight", when=lambda dims: not dims.tied),
    ),
    ignore=(H + "self_attn.rotary_emb.inv_freq",),
    prevalence=100,  # the architecture that inference programs support first
)

# The rows for related families: with biases of q, k and v only, and without biases.
WITH_QKV_BIAS = vary.weights(FAMILY.weights, without=[H + "self_attn.o_proj.bias"])
WITHOUT_BIAS = vary.weights(WITH_QKV_BIAS, without=[M + "self_attention.linear_qkv.bias"])
