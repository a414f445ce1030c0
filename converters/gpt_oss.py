"""gpt-oss: experts with biases and a clamped gate, attention with sinks, a window on every second layer, YaRN."""

from converters import llama
from mcore_convert.spec import (
    Concat,
    ConfigMapping,
    Family,
    Interleaved,
    Transposed,
    column,
    gated_column,
    replicated,
    row,
    vary,
)
from mcore_convert.spec.config.fields import constant, inert, only, same, unused, written
from mcore_convert.spec.config.windows import alternating_window
from mcore_convert.spec.config.yarn import yarn
from mcore_convert.spec.experts import every_layer, expert_size, num_experts, router
from mcore_convert.spec.layers import EXPERTS

YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
CONFIG = ConfigMapping(
    "gpt_oss",
    ("GptOssForCausalLM",),
    vary.fields(
        llama.SHARED,
        num_experts("num_local_experts", other="num_experts", default=128),
        expert_size("intermediate_size", default=2880, of_mlp=True),
        router(default=4, normed=True),
        every_layer(),
        yarn(theta=150000.0, default=YARN),
        alternating_window(default=128),
        # quick_gelu(gate) * (up + 1), with both clamped; alpha is a constant in Megatron Core's `quick_gelu`
        same("swiglu_limit", "activation_func_clamp_value", kind=float, default=7.0),
        only("swiglu_alpha", 1.702),
        constant(quick_geglu=True, swiglu=False, glu_linear_offset=1.0, softmax_type="learnable"),
        constant(normalization="RMSNorm", add_bias_linear=True),
        only("attention_bias", True),
        written(add_qkv_bias=True),  # biases in all linear layers include these
        written(bias_dropout_fusion=False),  # grouped experts with biases do not support it
        unused("openai_gelu"),
        inert(output_router_logits=False, router_aux_loss_coef=0.001),  # of training
        inert(experts_per_token=None, initial_context_length=None),  # not read by the class
        vocab_size=201088,
        hidden_size=2880,
        num_hidden_layers=36,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
    ),
)
M, H = llama.M, llama.H
A, B = M + "self_attention.", H + "self_attn."
E, F = M + "mlp.experts.experts.{expert}.", H + "mlp.experts."

# One tensor for all experts of a layer, `[experts, in, out]`, with interleaved columns of gate and up.
WEIGHTS = (
    replicated(M + "pre_mlp_layernorm.weight", "hidden", H + "post_attention_layernorm.weight"),
    replicated(M + "mlp.router.weight", "experts hidden", H + "mlp.router.weight"),
    replicated(M + "mlp.router.bias", "experts", H + "mlp.router.bias"),
    gated_column(
        E + "linear_fc1.weight", "gated_moe_ffn hidden", F + "gate_up_proj", pack=Transposed(Interleaved(Concat()))
    ),
    gated_column(E + "linear_fc1.bias", "gated_moe_ffn", F + "gate_up_proj_bias", pack=Interleaved(Concat())),
    row(E + "linear_fc2.weight", "hidden moe_ffn", F + "down_proj", pack=Transposed()),
    replicated(E + "linear_fc2.bias", "hidden", F + "down_proj_bias"),
)
ATTENTION = vary.weights(
    vary.with_biases(llama.WITH_QKV_BIAS, "linear_proj"),
    column(A + "core_attention.softmax_offset", "num_heads", B + "sinks"),
    after=A + "linear_qkv.bias",
)
DENSE = [weight.name for weight in ATTENTION if M + "mlp." in weight.name]
FAMILY = Family(
    "gpt_oss",
    ("GptOssForCausalLM",),
    CONFIG,
    vary.weights(ATTENTION, *vary.of_part(EXPERTS, WEIGHTS), without=DENSE, after=A + "linear_proj.bias"),
    prevalence=65,
)
