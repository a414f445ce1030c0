"""Nemotron-H, Nemotron Nano 2 and Nemotron 3 Nano: each layer is a Mamba mixer, attention, an MLP or experts.

Positions are encoded by the mixers only.
"""

from dataclasses import replace

from mcore_convert.spec import (
    QKV,
    ConfigMapping,
    Family,
    Spelling,
    Weight,
    buffer,
    column,
    replicated,
    row,
    segmented,
    vary,
    vocab,
)
from mcore_convert.spec.config.fields import (
    blank,
    constant,
    dtype,
    inert,
    only,
    query_groups,
    same,
    unused,
    vocabulary,
    written,
)
from mcore_convert.spec.config.hybrid import (
    epsilon,
    layer_pattern,
    mixer,
    no_predicted_tokens,
    size_of_head,
    where_experts_are,
)
from mcore_convert.spec.experts import expert_groups, expert_size, num_experts, scaled_weights, sigmoid_router
from mcore_convert.spec.gpt import MIXER_CONVOLUTION, MIXER_IN_PROJ
from mcore_convert.spec.hybrid import EPSILON
from mcore_convert.spec.layers import ATTENTION, EXPERTS, MAMBA, MLP

CONFIG = ConfigMapping(
    "nemotron_h",
    ("NemotronHForCausalLM",),
    (
        vocabulary(default=131072),
        layer_pattern(),
        same("hidden_size", "hidden_size", default=4096),
        same("intermediate_size", "ffn_hidden_size", default=21504),
        same("num_attention_heads", "num_attention_heads", default=32),
        query_groups(default=8),
        size_of_head(default=128),
        same("max_position_embeddings", "max_position_embeddings", default=4096),
        same("attention_dropout", "attention_dropout", kind=float, default=0.0),
        epsilon(),
        *mixer(),
        only("mlp_hidden_act", "relu2"),
        only("attention_bias", False),
        only("mlp_bias", False),
        only("sliding_window", None),
        only("tie_word_embeddings", False),  # transformers does not tie them in this class
        constant(normalization="RMSNorm", position_embedding_type="none", squared_relu=True, swiglu=False),
        constant(add_bias_linear=False, untie_embeddings_and_output_weights=True),
        *where_experts_are(
            num_experts("n_routed_experts", other="num_local_experts", default=8),
            expert_size("moe_intermediate_size", default=7688),
            same("moe_shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", default=7688),
            only("n_shared_experts", 1),
            constant(moe_shared_expert_gate=False),
            sigmoid_router(default=2),
            expert_groups(best=2, default=(1, 1), method=("noaux_tc", "noaux_tc")),
            scaled_weights(default=1.0),
            only("moe_latent_size", None),
            written(moe_grouped_gemm=True),  # always so in hybrids
        ),
        no_predicted_tokens(),
        inert(output_router_logits=False, moe_shared_expert_overlap=True, hidden_dropout=0.0),
        only("rms_norm_eps", EPSILON, write=False),  # other names of the epsilon
        only("norm_eps", EPSILON, write=False),
        inert(rope_theta=10000.0, partial_rotary_factor=1.0),  # not used: there are no rotary positions
        written(hidden_dropout=0.0),
        unused("bias_gelu_fusion", "openai_gelu", "use_te_activation_func", "rotary_percent", "rotary_interleaved"),
        blank("bos_token_id", "eos_token_id", "pad_token_id"),
        dtype(),
    ),
)

M, H = "decoder.layers.{layer}.", "backbone.layers.{layer}."
A, B = M + "mixer.", H + "mixer."
NORM = H + "norm.weight"
MIXER = (
    column(A + "dt_bias", "mamba_heads", B + "dt_bias"),
    column(A + "A_log", "mamba_heads", B + "A_log"),
    column(A + "D", "mamba_heads", B + "D"),
    replicated(A + "in_proj.layer_norm_weight", "hidden", NORM),
    segmented(A + "in_proj.weight", "mamba_in hidden", B + "in_proj.weight", segments=MIXER_IN_PROJ),
    segmented(A + "conv1d.weight", "mamba_conv one mamba_kernel", B + "conv1d.weight", segments=MIXER_CONVOLUTION),
    segmented(A + "conv1d.bias", "mamba_conv", B + "conv1d.bias", segments=MIXER_CONVOLUTION),
    column(A + "norm.weight", "mamba_inner", B + "norm.weight"),
    row(A + "out_proj.weight", "hidden mamba_inner", B + "out_proj.weight"),
)
HEADS = (
    replicated(M + "self_attention.linear_qkv.layer_norm_weight", "hidden", NORM),
    column(M + "self_attention.linear_qkv.weight", "qkv hidden", *(B + f"{x}_proj.weight" for x in "qkv"), pack=QKV()),
    row(M + "self_attention.linear_proj.weight", "hidden heads", B + "o_proj.weight"),
)
DENSE = (
    replicated(M + "mlp.linear_fc1.layer_norm_weight", "hidden", NORM),
    column(M + "mlp.linear_fc1.weight", "ffn hidden", B + "up_proj.weight"),
    row(M + "mlp.linear_fc2.weight", "hidden ffn", B + "down_proj.weight"),
)
OF_EXPERT = M + "mlp.experts.experts.{expert}."
SPARSE = (
    replicated(M + "pre_mlp_layernorm.weight", "hidden", NORM),
    replicated(M + "mlp.router.weight", "experts hidden", B + "gate.weight"),
    buffer(M + "mlp.router.expert_bias", "experts", B + "gate.e_score_correction_bias"),
    column(
        OF_EXPERT + "linear_fc1.weight",
        "moe_ffn hidden",
        B + "experts.{expert}.up_proj.weight",
        also=(Spelling((B + "experts.up_proj",)),),
    ),
    row(
        OF_EXPERT + "linear_fc2.weight",
        "hidden moe_ffn",
        B + "experts.{expert}.down_proj.weight",
        also=(Spelling((B + "experts.down_proj",)),),
    ),
    column(M + "mlp.shared_experts.linear_fc1.weight", "shared_ffn hidden", B + "shared_experts.up_proj.weight"),
    row(M + "mlp.shared_experts.linear_fc2.weight", "hidden shared_ffn", B + "shared_experts.down_proj.weight"),
)


def under_both_names(*rows: Weight) -> tuple[Weight, ...]:
    """Return the rows with the names of published files, and those of a model in transformers 5,
    which may be saved unchanged.
    """
    return tuple(
        replace(
            row,
            also=(
                *row.also,
                *(
                    Spelling(tuple(name.replace("backbone.", "model.") for name in each.hf), each.pack)
                    for each in row.spellings
                    if each.hf[0].startswith("backbone.")
                ),
            ),
        )
        for row in rows
    )


FAMILY = Family(
    "nemotron_h",
    ("NemotronHForCausalLM",),
    CONFIG,
    under_both_names(
        vocab("embedding.word_embeddings.weight", "vocab hidden", "backbone.embeddings.weight"),
        *vary.of_part(MAMBA, MIXER),
        *vary.of_part(ATTENTION, HEADS),
        *vary.of_part(MLP, DENSE),
        *vary.of_part(EXPERTS, SPARSE),
        replicated("decoder.final_norm.weight", "hidden", "backbone.norm_f.weight"),
        vocab("output_layer.weight", "vocab hidden", "lm_head.weight"),
    ),
    prevalence=40,
)
