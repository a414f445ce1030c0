"""Megatron-LM's flags of an architecture: their names, and the models that need them.

Names and types are those of 0.12 to 0.19 (`megatron/training/arguments.py`), as `fixtures/megatron_flags` has them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from mcore_convert.spec import hybrid
from mcore_convert.spec.config.arguments import Values
from mcore_convert.spec.config.linear import NO_LINEAR_ATTENTION


@dataclass(frozen=True)
class Flags:
    """A group of flags that a model needs together.

    `when` decides from the arguments whether a model needs them. `values` maps flags with a value to their arguments;
    a flag is omitted if the argument is None, or the flag's `plain` value. `switches` maps flags without a value to
    the argument and the value of it that requires them.
    """

    when: Callable[[Values], object]
    values: Mapping[str, str] = field(default_factory=dict)
    switches: Mapping[str, tuple[str, object]] = field(default_factory=dict)
    plain: Mapping[str, object] = field(default_factory=dict)


def named(*names: str) -> dict[str, str]:
    """Return the flags with the names of their arguments."""
    return {f"--{name.replace('_', '-')}": name for name in names}


# The groups below are in reading order. They include `--norm-epsilon`, `--rotary-base` and the rope scaling:
# `--use-checkpoint-args` reads neither the first nor the last in any version.
SIZES = Flags(
    lambda args: True,
    {
        "--num-layers": "num_layers",
        "--hidden-size": "hidden_size",
        "--ffn-hidden-size": "ffn_hidden_size",
        "--num-attention-heads": "num_attention_heads",
        "--kv-channels": "kv_channels",
        "--seq-length": "max_position_embeddings",
        "--max-position-embeddings": "max_position_embeddings",
        "--position-embedding-type": "position_embedding_type",
        "--normalization": "normalization",
        "--norm-epsilon": "layernorm_epsilon",
        "--window-size": "window_size",
        "--window-attn-skip-freq": "window_attn_skip_freq",
        "--softmax-type": "softmax_type",
        "--activation-func-clamp-value": "activation_func_clamp_value",
        "--glu-linear-offset": "glu_linear_offset",
        "--attention-dropout": "attention_dropout",
        "--hidden-dropout": "hidden_dropout",
        "--make-vocab-size-divisible-by": "make_vocab_size_divisible_by",
        "--tensor-model-parallel-size": "tensor_model_parallel_size",
        "--pipeline-model-parallel-size": "pipeline_model_parallel_size",
        "--num-layers-per-virtual-pipeline-stage": "num_layers_per_virtual_pipeline_stage",
        "--num-virtual-stages-per-pipeline-rank": "num_virtual_stages_per_pipeline_rank",
        "--decoder-first-pipeline-num-layers": "decoder_first_pipeline_num_layers",
        "--decoder-last-pipeline-num-layers": "decoder_last_pipeline_num_layers",
        "--pipeline-model-parallel-layout": "pipeline_model_parallel_layout",
        "--transformer-impl": "transformer_impl",
        "--ckpt-format": "ckpt_format",
    },
    plain={"--softmax-type": "vanilla", "--glu-linear-offset": 0.0},
)

SWITCHES = Flags(
    lambda args: True,
    switches={
        "--account-for-embedding-in-pipeline-split": ("account_for_embedding_in_pipeline_split", True),
        "--account-for-loss-in-pipeline-split": ("account_for_loss_in_pipeline_split", True),
        "--swiglu": ("swiglu", True),
        "--squared-relu": ("squared_relu", True),
        "--quick-geglu": ("quick_geglu", True),
        "--openai-gelu": ("openai_gelu", True),
        "--qk-layernorm": ("qk_layernorm", True),
        "--qk-l2-norm": ("qk_l2_norm", True),
        "--attention-output-gate": ("attention_output_gate", True),
        "--rotary-interleaved": ("rotary_interleaved", True),
        "--apply-layernorm-1p": ("layernorm_zero_centered_gamma", True),
        "--apply-residual-connection-post-layernorm": ("apply_residual_connection_post_layernorm", True),
        "--disable-bias-linear": ("add_bias_linear", False),
        "--no-bias-dropout-fusion": ("bias_dropout_fusion", False),
        "--untie-embeddings-and-output-weights": ("untie_embeddings_and_output_weights", True),
        "--bf16": ("bf16", True),
        "--fp16": ("fp16", True),
    },
)

GROUPED_QUERIES = Flags(
    lambda args: args.get("num_query_groups") != args.get("num_attention_heads"),
    {"--num-query-groups": "num_query_groups"},
    {"--group-query-attention": ("group_query_attention", True)},
)

QKV_BIAS = Flags(  # biases in all linear layers include these
    lambda args: not args["add_bias_linear"], switches={"--add-qkv-bias": ("add_qkv_bias", True)}
)

EXACT_GELU = Flags(  # the fused gelu is the tanh form
    lambda args: not args["swiglu"], switches={"--no-bias-gelu-fusion": ("bias_gelu_fusion", False)}
)

ROPE = Flags(
    lambda args: args["position_embedding_type"] in ("rope", "yarn"),
    {
        "--rotary-base": "rotary_base",
        "--rotary-percent": "rotary_percent",
        "--rotary-seq-len-interpolation-factor": "rotary_seq_len_interpolation_factor",
        "--no-rope-freq": "no_rope_freq",
    },
    {"--no-rope-fusion": ("rotary_interleaved", True)},  # Megatron-LM refuses it with the fused kernel, its default
    plain={"--rotary-percent": 1.0},
)

ROPE_SCALING = Flags(
    lambda args: args["position_embedding_type"] == "rope" and args["use_rope_scaling"],
    {"--rope-scaling-factor": "rope_scaling_factor"},
    {"--use-rope-scaling": ("use_rope_scaling", True)},
)

YARN = Flags(
    lambda args: args["position_embedding_type"] == "yarn" and not args.get("multi_latent_attention"),
    {
        "--rotary-scaling-factor": "rotary_scaling_factor",
        "--mscale": "mscale",
        "--mscale-all-dim": "mscale_all_dim",
        "--yarn-original-max-position-embeddings": "yarn_original_max_position_embeddings",
        "--yarn-beta-fast": "yarn_beta_fast",
        "--yarn-beta-slow": "yarn_beta_slow",
    },
    {"--no-yarn-correction-range-round-to-int": ("yarn_correction_range_round_to_int", False)},
)

# Every value is given, since the defaults of 0.12 and 0.16 differ (`--mscale-all-dim`).
OF_RANKS = named("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
LATENT_ATTENTION = Flags(
    lambda args: args.get("multi_latent_attention"),
    {**OF_RANKS, **named("rope_type", "rotary_scaling_factor", "mscale", "mscale_all_dim")},
    {"--multi-latent-attention": ("multi_latent_attention", True)},
    plain={"--rope-type": "yarn"},  # that of `MLATransformerConfig`; 0.12 has no flag for it
)

LINEAR_ATTENTION = Flags(
    lambda args: args.get("experimental_attention_variant"),
    named(*NO_LINEAR_ATTENTION),
)

# `--spec` has two words, and 0.17 and later accept one of the two names of the pattern.
HYBRID = Flags(
    hybrid.is_hybrid,
    {"--spec": "spec", **named(hybrid.PATTERN, hybrid.OLD_PATTERN, *hybrid.SIZES)},
    {"--is-hybrid-model": ("is_hybrid_model", True)},
)

EXPERTS = Flags(
    lambda args: args.get("num_experts"),
    {
        "--num-experts": "num_experts",
        "--moe-layer-freq": "moe_layer_freq",
        "--moe-ffn-hidden-size": "moe_ffn_hidden_size",
        "--moe-shared-expert-intermediate-size": "moe_shared_expert_intermediate_size",
        "--moe-latent-size": "moe_latent_size",
        "--moe-router-topk": "moe_router_topk",
        "--moe-router-num-groups": "moe_router_num_groups",
        "--moe-router-group-topk": "moe_router_group_topk",
        "--moe-router-topk-scaling-factor": "moe_router_topk_scaling_factor",
        **named("moe_router_score_function", "moe_router_dtype", "moe_router_load_balancing_type"),
        **named("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_bias_update_rate"),
        **named("moe_input_jitter_eps", "moe_expert_capacity_factor"),
        "--expert-model-parallel-size": "expert_model_parallel_size",
        "--expert-tensor-parallel-size": "expert_tensor_parallel_size",
    },
    {
        "--moe-grouped-gemm": ("moe_grouped_gemm", True),
        "--moe-shared-expert-gate": ("moe_shared_expert_gate", True),
        "--moe-router-pre-softmax": ("moe_router_pre_softmax", True),
        "--moe-router-enable-expert-bias": ("moe_router_enable_expert_bias", True),
        "--moe-pad-expert-input-to-capacity": ("moe_pad_expert_input_to_capacity", True),
    },
)

# Megatron-FSDP loads only its own format (`arguments.py`, `validate_args`).
FSDP = Flags(
    lambda args: args.get("ckpt_format") == "fsdp_dtensor",
    {"--data-parallel-sharding-strategy": "data_parallel_sharding_strategy"},
    {"--use-megatron-fsdp": ("use_megatron_fsdp", True)},
    plain={"--data-parallel-sharding-strategy": "no_shard"},
)

MTP = Flags(lambda args: args.get("mtp_num_layers"), {"--mtp-num-layers": "mtp_num_layers"})

OF_POSITIONS = (ROPE, ROPE_SCALING, YARN)
OF_ATTENTION = (LATENT_ATTENTION, LINEAR_ATTENTION, HYBRID)
ALL = (SIZES, GROUPED_QUERIES, SWITCHES, QKV_BIAS, EXACT_GELU, *OF_POSITIONS, *OF_ATTENTION, MTP, EXPERTS, FSDP)

# Flags for resuming with an optimizer's state. 0.19 identifies parameter groups by their learning rates, too
# (`optimizer.py`, `param_group_identifier_keys`), and every version compares the scheduler's numbers with the command
# line unless it has to use those of the checkpoint (`optimizer_param_scheduler.py`, `_check_and_set`).
OPTIMIZER = Flags(
    lambda args: True,
    {
        "--lr": "lr",
        "--min-lr": "min_lr",
        "--decoupled-lr": "decoupled_lr",
        "--decoupled-min-lr": "decoupled_min_lr",
    },
    {
        "--use-distributed-optimizer": ("use_distributed_optimizer", True),
        "--dist-ckpt-optim-fully-reshardable": ("dist_ckpt_optim_fully_reshardable", True),
    },
)

# The flat buffers in `distrib_optim.pt` have the dtype in which gradients are accumulated, and are cut at bucket ends.
BUFFERS = Flags(
    lambda args: args.get("use_distributed_optimizer") and args.get("ckpt_format") == "torch",
    {"--ddp-bucket-size": "ddp_bucket_size"},
    {
        "--overlap-grad-reduce": ("overlap_grad_reduce", True),
        "--accumulate-allreduce-grads-in-fp32": ("accumulate_allreduce_grads_in_fp32", True),
        "--grad-reduce-in-bf16": ("grad_reduce_in_bf16", True),
    },
)
