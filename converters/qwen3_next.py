"""Qwen3-Next: gated attention in some layers and the gated delta rule in the others, experts, a predicted token.

Hugging Face stores norms around zero, as Megatron Core does, except the one within the gated delta rule.
"""

from converters import llama, qwen2_moe, qwen3
from converters.qwen3_moe import ROUTED
from mcore_convert.spec import (
    ConfigMapping,
    Family,
    Segments,
    Weight,
    column,
    replicated,
    row,
    segmented,
    vary,
)
from mcore_convert.spec.config.fields import constant, inert, only
from mcore_convert.spec.config.linear import gated_delta_net, predicted_token
from mcore_convert.spec.config.mapping import Field
from mcore_convert.spec.config.rope import rope
from mcore_convert.spec.experts import expert_size, num_experts, router, shared_expert, sparse_layers
from mcore_convert.spec.gpt import CONVOLUTION, IN_PROJ
from mcore_convert.spec.layers import ATTENTION, EXPERTS, LINEAR, MLP

SHARED: tuple[Field, ...] = vary.fields(
    llama.SHARED, constant(add_qkv_bias=False), only("attention_bias", False), *gated_delta_net()
)
CONFIG = ConfigMapping(
    "qwen3_next",
    ("Qwen3NextForCausalLM",),
    vary.fields(
        SHARED,
        rope(percent=0.25),
        predicted_token("num_nextn_predict_layers"),
        num_experts("num_experts", other="num_local_experts", default=512),
        expert_size("moe_intermediate_size", default=512),
        shared_expert(default=512),
        *vary.fields([router(default=10)], norm_topk_prob=True),
        sparse_layers(),
        inert(output_router_logits=False, router_aux_loss_coef=0.001),  # of training
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=48,
        num_attention_heads=16,
        num_key_value_heads=2,
        head_dim=256,
        max_position_embeddings=32768,
        vocab_size=151936,
    ),
)
M, H = llama.M, llama.H
A, B = M + "self_attention.", H + "linear_attn."
PLAIN = [weight for weight in qwen3.WEIGHTS if "self_attention." in weight.name]
DENSE = [weight for weight in qwen3.WEIGHTS if "mlp." in weight.name]


def linear_attention(pack: Segments, *projections: str) -> tuple[Weight, ...]:
    """Return the rows of the gated delta rule; Hugging Face splits its first matrix into several `projections`."""
    return (
        column(A + "dt_bias", "linear_heads", B + "dt_bias"),
        column(A + "A_log", "linear_heads", B + "A_log"),
        replicated(A + "in_proj.layer_norm_weight", "hidden", H + "input_layernorm.weight"),
        segmented(
            A + "in_proj.weight",
            "linear_in hidden",
            *(B + f"in_proj_{name}.weight" for name in projections),
            segments=IN_PROJ,
            pack=pack,
        ),
        segmented(A + "conv1d.weight", "linear_conv one linear_kernel", B + "conv1d.weight", segments=CONVOLUTION),
        replicated(A + "out_norm.weight", "linear_head", B + "norm.weight", less=1),
        row(A + "out_proj.weight", "hidden linear_values", B + "out_proj.weight"),
    )


def rows(linear: tuple[Weight, ...], *mlp: Weight) -> tuple[Weight, ...]:
    """Return the rows of a model: plain or linear attention, then one MLP or experts."""
    first, *last = (weight for weight in qwen3.WEIGHTS if not weight.per_layer)
    layer = (*vary.of_part(ATTENTION, PLAIN), *vary.of_part(LINEAR, linear), *mlp)
    return vary.with_predicted_token((first, *layer, *last), H)


WITH_EXPERTS = vary.of_part(EXPERTS, (*ROUTED, *qwen2_moe.SHARED))
QKVZ, BA = tuple(IN_PROJ.values())[:4], tuple(IN_PROJ.values())[4:]  # grouped by key head
FAMILY = Family(
    "qwen3_next",
    ("Qwen3NextForCausalLM",),
    CONFIG,
    rows(
        linear_attention(Segments((QKVZ, BA), groups="linear_key_heads"), "qkvz", "ba"),
        *vary.of_part(MLP, DENSE),
        *WITH_EXPERTS,
    ),
    prevalence=66,
)
