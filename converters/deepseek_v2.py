"""DeepSeek-V2 and V2-Lite: latent attention, and experts with softmax weights."""

from converters import deepseek_v3, llama
from mcore_convert.spec import ConfigMapping, Family, vary
from mcore_convert.spec.config.fields import inert, only
from mcore_convert.spec.config.latent import latent_attention, latent_rope
from mcore_convert.spec.experts import (
    expert_groups,
    expert_size,
    first_dense_layers,
    num_experts,
    router,
    scaled_weights,
    shared_experts,
)

CONFIG = ConfigMapping(
    "deepseek_v2",
    ("DeepseekV2ForCausalLM",),
    vary.fields(
        llama.SHARED,
        latent_rope(),
        *latent_attention(),
        only("mlp_bias", False),
        num_experts("n_routed_experts", other="num_experts", default=64),
        expert_size("moe_intermediate_size", default=1407),
        shared_experts(default=2),
        first_dense_layers(default=0),
        router(default=None, normed=False),
        only("norm_topk_prob", False),
        expert_groups(best=1, default=(None, None), method=("greedy", "group_limited_greedy")),
        scaled_weights(default=1.0),
        only("scoring_func", "softmax"),
        inert(output_router_logits=False, aux_loss_alpha=0.001, seq_aux=True, ep_size=1),  # of training
        vocab_size=102400,
    ),
)
FAMILY = Family(
    "deepseek_v2",
    ("DeepseekV2ForCausalLM",),
    CONFIG,
    deepseek_v3.with_experts(deepseek_v3.LATENT),
    ignore=(deepseek_v3.H + "self_attn.rotary_emb.inv_freq",),
    prevalence=45,
)
