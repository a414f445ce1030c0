"""Qwen3-MoE: Qwen3 with experts in all or some layers."""

from converters import llama, qwen3
from mcore_convert.spec import Concat, ConfigMapping, Family, Spelling, Weight, gated_column, replicated, row, vary
from mcore_convert.spec.config.fields import inert, sliding_window
from mcore_convert.spec.experts import expert_size, num_experts, router, sparse_layers
from mcore_convert.spec.layers import EXPERTS, MLP

CONFIG = ConfigMapping(
    "qwen3_moe",
    ("Qwen3MoeForCausalLM",),
    vary.fields(
        qwen3.CONFIG.fields,
        num_experts("num_experts", other="num_local_experts", default=128),
        expert_size("moe_intermediate_size", default=768),
        router(default=8),
        sparse_layers(),
        sliding_window(default=4096, switch="use_sliding_window"),
        inert(output_router_logits=False, router_aux_loss_coef=0.001),  # of training
        inert(max_window_layers=28),  # not read by the class
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=24,
        num_key_value_heads=4,
        head_dim=None,
    ),
)
M, H = llama.M + "mlp.", llama.H + "mlp."

# One tensor for each matrix of each expert, or one for all experts of a layer, as in transformers 5.
ROUTED: tuple[Weight, ...] = (
    replicated(llama.M + "pre_mlp_layernorm.weight", "hidden", llama.H + "post_attention_layernorm.weight"),
    replicated(M + "router.weight", "experts hidden", H + "gate.weight"),
    gated_column(
        M + "experts.experts.{expert}.linear_fc1.weight",
        "gated_moe_ffn hidden",
        H + "experts.{expert}.gate_proj.weight",
        H + "experts.{expert}.up_proj.weight",
        pack=Concat(),
        also=(Spelling((H + "experts.gate_up_proj",)),),
    ),
    row(
        M + "experts.experts.{expert}.linear_fc2.weight",
        "hidden moe_ffn",
        H + "experts.{expert}.down_proj.weight",
        also=(Spelling((H + "experts.down_proj",)),),
    ),
)


def with_experts(base: tuple[Weight, ...], *own: Weight) -> tuple[Weight, ...]:
    """Return the rows of a dense family, extended by experts for the layers that have them."""
    dense = [weight for weight in base if weight.mcore is not None and M in weight.mcore]
    return vary.weights(
        base, *vary.of_part(MLP, dense), *vary.of_part(EXPERTS, (*ROUTED, *own)), after=M + "linear_fc2.weight"
    )


FAMILY = Family("qwen3_moe", ("Qwen3MoeForCausalLM",), CONFIG, with_experts(qwen3.WEIGHTS), prevalence=70)
