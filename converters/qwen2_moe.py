"""Qwen2-MoE (Qwen1.5-MoE): Qwen2 with experts, one of them shared and gated."""

from converters import llama, qwen2
from converters.qwen3_moe import with_experts
from mcore_convert.spec import Concat, ConfigMapping, Family, gated_column, replicated, row, vary
from mcore_convert.spec.config.fields import inert, same
from mcore_convert.spec.experts import expert_size, num_experts, router, shared_expert, sparse_layers

CONFIG = ConfigMapping(
    "qwen2_moe",
    ("Qwen2MoeForCausalLM",),
    vary.fields(
        qwen2.CONFIG.fields,
        same("qkv_bias", "add_qkv_bias", kind=bool, default=True),
        num_experts("num_experts", other="num_local_experts", default=60),
        expert_size("moe_intermediate_size", default=1408),
        shared_expert(default=5632),
        router(default=4),
        sparse_layers(),
        inert(output_router_logits=False, router_aux_loss_coef=0.001),  # of training
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=24,
        num_attention_heads=16,
        num_key_value_heads=16,
        sliding_window=0,  # the class's value for no window
    ),
)
M, H = llama.M + "mlp.shared_experts.", llama.H + "mlp."
SHARED = (
    gated_column(
        M + "linear_fc1.weight",
        "gated_shared_ffn hidden",
        H + "shared_expert.gate_proj.weight",
        H + "shared_expert.up_proj.weight",
        pack=Concat(),
    ),
    row(M + "linear_fc2.weight", "hidden shared_ffn", H + "shared_expert.down_proj.weight"),
    replicated(M + "gate_weight", "one hidden", H + "shared_expert_gate.weight"),
)
FAMILY = Family(
    "qwen2_moe", ("Qwen2MoeForCausalLM",), CONFIG, with_experts(llama.WITH_QKV_BIAS, *SHARED), prevalence=30
)
