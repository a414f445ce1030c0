"""GLM-4.5 and 4.6: Llama's attention with norms of queries and keys, DeepSeek-V3's experts."""

from converters import deepseek_v3, llama
from mcore_convert.spec import ConfigMapping, Family, replicated, vary
from mcore_convert.spec.config.fields import constant, same
from mcore_convert.spec.config.rope import rope
from mcore_convert.spec.experts import num_experts

CONFIG = ConfigMapping(
    "glm4_moe",
    ("Glm4MoeForCausalLM",),
    vary.fields(
        vary.fields(llama.SHARED, *deepseek_v3.OF_EXPERTS),
        num_experts("n_routed_experts", other="num_local_experts", default=128),
        rope(percent=0.5),
        constant(rotary_interleaved=False),
        same("attention_bias", "add_qkv_bias", kind=bool, default=False),  # of q, k and v only
        same("use_qk_norm", "qk_layernorm", kind=bool, default=False),
        vocab_size=151552,
        intermediate_size=10944,
        num_hidden_layers=46,
        num_attention_heads=96,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        moe_intermediate_size=1408,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=1.0,
    ),
)
M, H = llama.M + "self_attention.", llama.H + "self_attn."
ATTENTION = [weight for weight in llama.WITH_QKV_BIAS if weight.per_layer and "mlp." not in weight.name]
NORMS = [
    replicated(M + f"{x}_layernorm.weight", "head", H + f"{x}_norm.weight", when=lambda dims: dims.qk_norm)
    for x in "qk"
]
ROWS = vary.weights(ATTENTION, *NORMS, after=M + "linear_qkv.bias")
FAMILY = Family(
    "glm4_moe",
    ("Glm4MoeForCausalLM",),
    CONFIG,
    vary.with_predicting(deepseek_v3.with_experts(ROWS, deepseek_v3.BIAS), llama.H),
    prevalence=60,
)
