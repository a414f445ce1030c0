"""DeepSeek-V3 and R1, Moonlight, Kimi K2: latent attention, experts with a bias for selection, predicted tokens."""

from converters import llama
from converters.qwen3_moe import ROUTED
from mcore_convert.spec import (
    Concat,
    ConfigMapping,
    Family,
    Weight,
    buffer,
    column,
    gated_column,
    replicated,
    row,
    vary,
)
from mcore_convert.spec.config.fields import inert, only
from mcore_convert.spec.config.latent import latent_attention, latent_rope, predicted_tokens
from mcore_convert.spec.experts import (
    expert_groups,
    expert_size,
    first_dense_layers,
    num_experts,
    scaled_weights,
    shared_experts,
    sigmoid_router,
)
from mcore_convert.spec.layers import EXPERTS, MLP

# Fields of the experts of DeepSeek-V3, also used by GLM-4.5.
OF_EXPERTS = (
    num_experts("n_routed_experts", other="num_local_experts", default=256),
    expert_size("moe_intermediate_size", default=2048),
    shared_experts(default=1),
    first_dense_layers(default=3),
    sigmoid_router(default=8),
    expert_groups(best=2, default=(8, 4), method=("noaux_tc", "noaux_tc")),
    scaled_weights(default=2.5),
    only("scoring_func", "sigmoid"),
    predicted_tokens(),
    inert(output_router_logits=False, aux_loss_alpha=0.001, seq_aux=True, ep_size=1),  # of training
)
OWN = vary.fields(
    llama.SHARED,
    latent_rope(),
    *latent_attention(),
    *OF_EXPERTS,
    only("rope_interleave", True, write=False),
    vocab_size=129280,
    hidden_size=7168,
    intermediate_size=18432,
    num_hidden_layers=61,
    num_attention_heads=128,
    max_position_embeddings=4096,
)
KIMI = ConfigMapping("kimi_k2", ("DeepseekV3ForCausalLM",), OWN)
CONFIG = ConfigMapping("deepseek_v3", ("DeepseekV3ForCausalLM",), OWN, dialects=(KIMI,))

M, H = llama.M, llama.H
A, B = M + "self_attention.", H + "self_attn."
LATENT: tuple[Weight, ...] = (
    replicated(M + "input_layernorm.weight", "hidden", H + "input_layernorm.weight"),
    column(
        A + "linear_q_proj.weight",
        "q_latent hidden",
        B + "q_proj.weight",
        when=lambda dims: not dims.low_rank_queries,
    ),
    replicated(
        A + "linear_q_down_proj.weight",
        "q_rank hidden",
        B + "q_a_proj.weight",
        when=lambda dims: dims.low_rank_queries,
    ),
    replicated(
        A + "linear_q_up_proj.layer_norm_weight",
        "q_rank",
        B + "q_a_layernorm.weight",
        when=lambda dims: dims.low_rank_queries,
    ),
    column(
        A + "linear_q_up_proj.weight",
        "q_latent q_rank",
        B + "q_b_proj.weight",
        when=lambda dims: dims.low_rank_queries,
    ),
    replicated(A + "linear_kv_down_proj.weight", "kv_down hidden", B + "kv_a_proj_with_mqa.weight"),
    replicated(A + "linear_kv_up_proj.layer_norm_weight", "kv_rank", B + "kv_a_layernorm.weight"),
    column(A + "linear_kv_up_proj.weight", "kv_latent kv_rank", B + "kv_b_proj.weight"),
    row(A + "linear_proj.weight", "hidden v_latent", B + "o_proj.weight"),
)
BIAS = buffer(M + "mlp.router.expert_bias", "experts", H + "mlp.gate.e_score_correction_bias")
SHARED: tuple[Weight, ...] = (
    gated_column(
        M + "mlp.shared_experts.linear_fc1.weight",
        "gated_shared_ffn hidden",
        H + "mlp.shared_experts.gate_proj.weight",
        H + "mlp.shared_experts.up_proj.weight",
        pack=Concat(),
    ),
    row(
        M + "mlp.shared_experts.linear_fc2.weight",
        "hidden shared_ffn",
        H + "mlp.shared_experts.down_proj.weight",
    ),
)


def with_experts(attention: tuple[Weight, ...], *bias: Weight) -> tuple[Weight, ...]:
    """Return the rows of a decoder with this attention, followed in each layer by an MLP,
    or by routed and shared experts.
    """
    first, *last = (weight for weight in llama.WITHOUT_BIAS if not weight.per_layer)
    dense = [weight for weight in llama.WITHOUT_BIAS if weight.per_layer and "mlp." in weight.name]
    norm, router, *routed = ROUTED
    experts = (norm, router, *bias, *routed, *SHARED)
    return (first, *attention, *vary.of_part(MLP, dense), *vary.of_part(EXPERTS, experts), *last)


FAMILY = Family(
    "deepseek_v3",
    ("DeepseekV3ForCausalLM",),
    CONFIG,
    vary.with_predicting(with_experts(LATENT, BIAS), H),
    ignore=(H + "self_attn.rotary_emb.inv_freq",),
    prevalence=75,
)
