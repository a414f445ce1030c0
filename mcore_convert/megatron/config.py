"""Megatron Core's `TransformerConfig` from the Megatron-LM arguments that a checkpoint stores."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from mcore_convert.errors import ConfigError
from mcore_convert.megatron.cpu import import_megatron
from mcore_convert.spec import gpt, hybrid
from mcore_convert.spec.config.arguments import YARN_DEFAULTS, YARN_FIELDS
from mcore_convert.spec.layers import GATED_DELTA_NET, plain_frequency

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

# Arguments with the same name in TransformerConfig. Those that only make training faster are not among them.
SAME = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "ffn_hidden_size",
    "kv_channels",
    "normalization",
    "layernorm_epsilon",
    "layernorm_zero_centered_gamma",
    "add_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "rotary_interleaved",
    "no_rope_freq",
    "window_size",
    "window_attn_skip_freq",
    "softmax_type",
    "activation_func_clamp_value",
    "glu_linear_offset",
    "apply_query_key_layer_scaling",
    "attention_softmax_in_fp32",
    "fp32_residual_connection",
)

# The same, for models with experts only: TransformerConfig refuses some of them elsewhere.
SAME_OF_EXPERTS = (
    "moe_ffn_hidden_size",
    "moe_router_topk",
    "moe_router_pre_softmax",
    "moe_router_score_function",
    "moe_router_topk_scaling_factor",
    "moe_router_enable_expert_bias",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_shared_expert_intermediate_size",
    "moe_shared_expert_gate",
)

# The same, of latent attention, which has a class of its own (`MLATransformerConfig`).
SAME_OF_LATENT_ATTENTION = (
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
    "rotary_base",
    "rotary_percent",
    "rope_type",
    "rotary_scaling_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
)

# The same, of linear attention.
SAME_OF_LINEAR_ATTENTION = (
    "experimental_attention_variant",
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
)

# The same, of hybrids.
SAME_OF_HYBRIDS = ("mamba_state_dim", "mamba_head_dim", "mamba_num_groups", "mamba_num_heads", "is_hybrid_model")

# Arguments of another name, older spellings last.
RENAMED = {
    "norm_epsilon": "layernorm_epsilon",
    "apply_layernorm_1p": "layernorm_zero_centered_gamma",
    "num_experts": "num_moe_experts",
}

# Arguments that cut the layers into pipeline stages; without pipeline parallelism they have no effect on the model.
STAGES = {
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split": "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split": "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout": "pipeline_model_parallel_layout",
}

# Arguments that change the mathematics in a way that is not supported here, with the values that do not.
ONLY: dict[str, tuple[Any, ...]] = {
    "mtp_use_repeated_layer": (False,),
    "mtp_hybrid_override_pattern": (),
    "moe_latent_size": (),
    "heterogeneous_layers_config_path": (),
    "heterogeneous_layers_config_encoded_json": (),
    "experimental_attention_variant": (GATED_DELTA_NET,),
    "linear_attention_type": (),
    "qk_l2_norm": (False,),
    "mrope_section": (),
    "apply_residual_connection_post_layernorm": (False,),
    "moe_apply_probs_on_input": (False,),
}

# The same, where attention is not latent and YaRN does not scale positions.
ONLY_ELSEWHERE: dict[str, tuple[Any, ...]] = {"rotary_scaling_factor": (1.0,), "rope_type": ("rope",)}


def config_of(
    args: Mapping[str, Any], *, dtype: torch.dtype = torch.float32, settings: Mapping[str, Any] | None = None
) -> TransformerConfig:
    """Return the configuration from Megatron-LM's `core_transformer_config_from_args`, without fusions and dropout.

    The parallel sizes are those of the current process groups, not those that the checkpoint was written with.
    `settings` are fields to override.

    Raises:
        ConfigError: an argument is missing, or requests a feature that is not supported here.
    """
    import_megatron()
    from megatron.core import parallel_state
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    _refuse_unknown_mathematics(args)
    pp = parallel_state.get_pipeline_model_parallel_world_size()
    is_latent = bool(args.get("multi_latent_attention"))
    same = (*SAME, *SAME_OF_EXPERTS) if args.get("num_experts") else SAME
    same = (*same, *SAME_OF_LATENT_ATTENTION) if is_latent else same
    same = (*same, *SAME_OF_LINEAR_ATTENTION) if args.get("experimental_attention_variant") else same
    same = (*same, *SAME_OF_HYBRIDS) if hybrid.is_hybrid(args) else same
    fields = {**RENAMED, **{name: name for name in same}, **(STAGES if pp > 1 else {})}
    chosen = {field: args[name] for name, field in fields.items() if args.get(name) is not None}
    missing = [name for name in ("num_layers", "hidden_size", "num_attention_heads") if name not in chosen]
    if missing:
        raise ConfigError("the Megatron arguments do not describe a model", items=missing)
    if args.get("apply_layernorm_1p"):  # Megatron-LM's switch; the field's own default may be stored beside it
        chosen["layernorm_zero_centered_gamma"] = True
    if args.get("group_query_attention"):  # without it num_query_groups is 1, which would mean multi-query attention
        chosen["num_query_groups"] = args["num_query_groups"]
    if chosen.get("num_moe_experts"):
        chosen.setdefault("moe_ffn_hidden_size", args.get("ffn_hidden_size"))
        chosen["moe_layer_freq"] = plain_frequency(args.get("moe_layer_freq", 1))
        chosen["moe_token_dispatcher_type"] = "allgather"  # the other dispatcher needs CUDA streams
        chosen["moe_router_load_balancing_type"] = "none"  # balancing losses do not matter in a forward pass
    if args.get("linear_attention_freq") is not None:
        chosen["linear_attention_freq"] = plain_frequency(args["linear_attention_freq"], "linear_attention_freq")
    if args.get("attention_output_gate"):
        chosen["attention_output_gate"] = True
    if is_latent:
        chosen["q_lora_rank"] = args.get("q_lora_rank")  # None disables the low rank
    if hybrid.is_hybrid(args):
        chosen["use_mamba_mem_eff_path"] = False  # that path has its own kernel
    if args.get("mtp_num_layers"):
        chosen["mtp_num_layers"] = args["mtp_num_layers"]
    activation, gated = activation_of(args)
    fields_of_run = {
        "activation_func": activation,
        "gated_linear_unit": gated,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "use_cpu_initialization": not torch.cuda.is_available(),
        "perform_initialization": False,
        "cuda_graph_scope": [],  # the default warns that it is deprecated
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": parallel_state.get_virtual_pipeline_model_parallel_world_size(),
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
    }
    config = (MLATransformerConfig if is_latent else TransformerConfig)(
        **{**chosen, **fields_of_run, **(settings or {})}
    )
    if has_yarn(args):  # attributes that are not fields (`gpt_model.py`)
        for attribute, name in YARN_FIELDS.items():
            setattr(config, attribute, YARN_DEFAULTS[name] if args.get(name) is None else args[name])
    return config


def has_yarn(args: Mapping[str, Any]) -> bool:
    """Return whether YaRN scales positions in attention that is not latent."""
    return args.get("position_embedding_type") == "yarn" and not args.get("multi_latent_attention")


def activation_of(args: Mapping[str, Any]) -> tuple[Callable[[torch.Tensor], torch.Tensor], bool]:
    """Return the activation of the MLP, and whether it gates a second half."""
    from megatron.core.activations import quick_gelu, squared_relu

    if args.get("swiglu"):
        return functional.silu, True
    if args.get("quick_geglu"):
        return quick_gelu, True
    if args.get("squared_relu"):
        return squared_relu, False
    # Megatron's fused bias and gelu computes the tanh form (fusions/fused_bias_gelu.py), the unfused one the exact erf
    return (
        partial(functional.gelu, approximate="tanh") if args.get("bias_gelu_fusion", True) else functional.gelu
    ), False


def _refuse_unknown_mathematics(args: Mapping[str, Any]) -> None:
    is_scaled = args.get("multi_latent_attention") or has_yarn(args)
    bad = gpt.refusals(args) if hybrid.is_hybrid(args) else []
    bad += [
        f"{name} = {args[name]!r}"
        for name, allowed in {**ONLY, **({} if is_scaled else ONLY_ELSEWHERE)}.items()
        if args.get(name) is not None and args[name] not in allowed
    ]
    if bad:
        raise ConfigError(
            "a model with these Megatron arguments cannot be built here",
            items=bad,
            hint="verify without --logits compares the weights themselves",
        )
