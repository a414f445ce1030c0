"""Megatron-Bridge's `run_config.yaml`; without it Megatron-Bridge assumes a Megatron-LM checkpoint and guesses more.

Facts are from Megatron-Bridge 0.1 to 0.6 and main (August 2026): `training/model_load_save.py: load_model_config`
instantiates `model`, `training/checkpointing.py` reads the parallel sizes and three keys of `checkpoint`.
"""

from __future__ import annotations

import json
from typing import Any

from mcore_convert.errors import ConfigError
from mcore_convert.spec import hybrid
from mcore_convert.spec.config.arguments import LATENT_DEFAULTS, YARN_FIELDS, Values, normalise
from mcore_convert.spec.config.linear import NO_LINEAR_ATTENTION

# The provider that every version has, for all families; the providers of single families differ between versions.
PROVIDER = "megatron.bridge.models.gpt_provider.GPTModelProvider"
LATENT_PROVIDER = "megatron.bridge.models.mla_provider.MLAModelProvider"  # based on `MLATransformerConfig`
BRIDGED = (
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
    "gpt_oss",
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_moe",
    "qwen3_next",
)  # the families for which Megatron-Bridge has a bridge, so that it can export them

# Functions are written as targets to import and not to call.
ACTIVATIONS = {
    "silu": "torch.nn.functional.silu",
    "gelu": "torch.nn.functional.gelu",
    "quick_gelu": "megatron.core.fusions.fused_bias_geglu.quick_gelu",
    "squared_relu": "megatron.core.activations.squared_relu",
}

# Fields of the provider with the name and the value of an argument.
FIELDS = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "normalization",
    "layernorm_epsilon",
    "layernorm_zero_centered_gamma",
    "add_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "attention_dropout",
    "hidden_dropout",
    "position_embedding_type",
    "rotary_base",
    "rotary_percent",
    "rotary_interleaved",
    "make_vocab_size_divisible_by",
    "vocab_size",
    "fp16",
    "bf16",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
)


# Further such fields of a model with experts; None stands for the provider's default.
EXPERT_FIELDS = (
    "moe_layer_freq",
    "moe_ffn_hidden_size",
    "moe_grouped_gemm",
    "moe_router_topk",
    "moe_router_pre_softmax",
    "moe_router_score_function",
    "moe_router_topk_scaling_factor",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_router_enable_expert_bias",
    "moe_router_load_balancing_type",
    "moe_aux_loss_coeff",
    "moe_shared_expert_intermediate_size",
    "moe_shared_expert_gate",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)


# Further such fields of latent attention; a query rank of None means that queries have no low-rank projection.
LATENT_FIELDS = (
    "multi_latent_attention",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
    *LATENT_DEFAULTS,
)


# Function that builds the layers of a model with linear attention, instead of the provider's own.
MIXED_LAYERS = (
    "megatron.core.models.gpt.experimental_attention_variant_module_specs."
    "get_transformer_block_with_experimental_attention_variant_spec"
)

# Fields that older providers lack: written only if they have an effect.
YOUNG_FIELDS = (
    "no_rope_freq",
    "window_size",
    "window_attn_skip_freq",
    "activation_func_clamp_value",
    "glu_linear_offset",
    "mtp_num_layers",
    "attention_output_gate",
)


def run_config(args: Values, family_name: str) -> str:
    """Return the text of `run_config.yaml` for arguments from `completion.complete`.

    `vocab_size` is the true one; the provider pads it for the current parallel size. Versions before 0.3 lack
    `rope_scaling`; they drop it with a warning, which changes what the model computes but not an export.

    Raises:
        ConfigError: the arguments have no vocabulary size.
    """
    args = normalise(args)
    if args.get("vocab_size") is None:
        raise ConfigError("Megatron-Bridge needs `vocab_size`, and the arguments do not tell it")
    others = {"squared_relu": "squared_relu", "quick_geglu": "quick_gelu"}
    activation = "silu" if args["swiglu"] else next((own for name, own in others.items() if args.get(name)), "gelu")
    dtype = _symbol(f"torch.{'bfloat16' if args.get('bf16') else 'float16' if args.get('fp16') else 'float32'}")
    is_latent = bool(args.get("multi_latent_attention"))
    model: dict[str, Any] = {"_target_": LATENT_PROVIDER if is_latent else PROVIDER}
    model |= {name: args[name] for name in FIELDS if name in args}
    model |= {name: args[name] for name in YOUNG_FIELDS if args.get(name)}
    model |= {"softmax_type": args["softmax_type"]} if args.get("softmax_type") not in (None, "vanilla") else {}
    model |= {"bias_dropout_fusion": False} if args.get("bias_dropout_fusion") is False else {}
    if args["position_embedding_type"] == "yarn" and not is_latent:
        model |= {attribute: args[name] for attribute, name in YARN_FIELDS.items()}
    if args.get("experimental_attention_variant"):
        model |= {name: args[name] for name in NO_LINEAR_ATTENTION}
        model["transformer_layer_spec"] = _symbol(MIXED_LAYERS)
    model |= {name: args.get(name) for name in LATENT_FIELDS} if is_latent else {}
    if args.get("num_experts"):
        model["num_moe_experts"] = args["num_experts"]
        model |= {name: args[name] for name in EXPERT_FIELDS if args.get(name) is not None}
    model |= {
        "gated_linear_unit": args["swiglu"] or bool(args.get("quick_geglu")),
        "activation_func": _symbol(ACTIVATIONS[activation]),
        # a gelu fused with its bias is a different function from the plain one
        "bias_activation_fusion": activation == "silu" or ("gelu" in activation and args["bias_gelu_fusion"]),
        "share_embeddings_and_output_weights": not args["untie_embeddings_and_output_weights"],
        "rope_scaling": args["use_rope_scaling"],
        "rope_scaling_factor": args["rope_scaling_factor"],
        "seq_len_interpolation_factor": args.get("rotary_seq_len_interpolation_factor"),
        "seq_length": args["max_position_embeddings"],
        "should_pad_vocab": True,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
    }
    checkpoint = {"save_optim": False, "save_rng": False, "fully_parallel_save": False}
    return "\n".join(
        [
            "# For Megatron-Bridge: load_megatron_model and export_ckpt, given the directory that holds this file.",
            *(
                []
                if family_name in BRIDGED
                else [f"# Megatron-Bridge loads this model, but has no bridge for `{family_name}`."]
            ),
            *_section("model", model),
            *_section("checkpoint", checkpoint),
            "",
        ]
    )


# Fields of the model that depend on the layout: the provider's name -> the argument.
LAYOUT_FIELDS = {
    "tensor_model_parallel_size": "tensor_model_parallel_size",
    "pipeline_model_parallel_size": "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size": "virtual_pipeline_model_parallel_size",
    "expert_model_parallel_size": "expert_model_parallel_size",
    "expert_tensor_parallel_size": "expert_tensor_parallel_size",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split": "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split": "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout": "pipeline_model_parallel_layout",
}


def rewritten(tree: Values, args: Values, *, optimizer: bool, random: bool) -> dict[str, Any]:
    """Return a `run_config.yaml` with the fields that another layout changes;
    all other sections stay as they were read.

    Args:
        args: the arguments of the target checkpoint.
        optimizer: whether the optimizer's state is written, in the form that any layout can load.
        random: whether random states are written.
    """
    model = dict(tree["model"])
    nested = isinstance(model.get("transformer"), dict)
    inner = dict(model["transformer"]) if nested else model
    for name, argument in LAYOUT_FIELDS.items():
        if name in inner or args.get(argument):
            inner[name] = args.get(argument)
    pattern = args.get(hybrid.PATTERN) or args.get(hybrid.OLD_PATTERN)
    inner |= {name: pattern for name in (hybrid.PATTERN, hybrid.OLD_PATTERN) if inner.get(name) is not None}
    if args.get("tensor_model_parallel_size") == 1 and inner.get("sequence_parallel"):
        inner["sequence_parallel"] = False
    if nested:
        model["transformer"] = inner
    stated = tree.get("checkpoint")
    checkpoint = dict(stated) if isinstance(stated, dict) else {}
    checkpoint |= {
        "save_optim": optimizer,
        "save_rng": random,
        "fully_parallel_save": checkpoint.get("fully_parallel_save", False),
    }
    if optimizer and args.get("dist_ckpt_optim_fully_reshardable"):
        checkpoint["dist_ckpt_optim_fully_reshardable"] = True
    return {**tree, "model": model, "checkpoint": checkpoint}


def _symbol(path: str) -> dict[str, Any]:
    return {"_target_": path, "_call_": False}


def _section(name: str, values: dict[str, Any]) -> list[str]:
    lines = [f"{name}:"]
    for key, value in values.items():
        if isinstance(value, dict):
            lines += [f"  {key}:", *(f"    {inner}: {_scalar(each)}" for inner, each in value.items())]
        else:
            lines.append(f"  {key}: {_scalar(value)}")
    return lines


def _scalar(value: Any) -> str:
    """Format a YAML scalar: as JSON, except small floats. YAML 1.1 reads `1e-05` as a string, `1.0e-05` as a float."""
    text = json.dumps(value, default=str)
    if isinstance(value, float) and "e" in text and "." not in text:
        return text.replace("e", ".0e")
    return text
