"""Qwen3.5-MoE, the text model: Qwen3.5 with experts in each layer, one of them shared and gated."""

from converters import qwen3_5, qwen3_next
from mcore_convert.spec import ConfigMapping, Family, vary
from mcore_convert.spec.config.fields import inert
from mcore_convert.spec.experts import every_layer, expert_size, num_experts, router, shared_expert

CONFIG = ConfigMapping(
    "qwen3_5_moe_text",
    ("Qwen3_5MoeForCausalLM",),
    vary.fields(
        [field for field in qwen3_next.SHARED if "intermediate_size" not in field.hf],
        *qwen3_5.OWN,
        num_experts("num_experts", other="num_local_experts", default=256),
        expert_size("moe_intermediate_size", default=512, of_mlp=True),
        shared_expert(default=512),
        router(default=8, normed=True),
        every_layer(),
        inert(output_router_logits=False, router_aux_loss_coef=0.001),  # of training
        inert(mlp_only_layers=None),  # not read by the class
        vocab_size=248320,
        hidden_size=2048,
        num_hidden_layers=40,
        num_attention_heads=16,
        num_key_value_heads=2,
        head_dim=256,
        max_position_embeddings=32768,
    ),
)
FAMILY = Family(
    "qwen3_5_moe",
    ("Qwen3_5MoeForCausalLM",),
    CONFIG,
    qwen3_next.rows(qwen3_5.LINEAR, *qwen3_next.WITH_EXPERTS),
    prevalence=67,
)
