"""Megatron Core's configuration classes, as other programs store them, converted to Megatron-LM's arguments.

`TransformerConfig`, and the fields that Megatron-Bridge (`GPTModelProvider`, `GPTModelConfig`) and NeMo (`GPTConfig`)
add. Most fields have the name of an argument, since Megatron-LM builds the former from the latter
(`training/arguments.py`, `core_transformer_config_from_args`); the tables here have the others. Facts are from
Megatron Core 0.12 to 0.19
(`transformer_config.py`), Megatron-Bridge 0.2 to 0.6 (`models/gpt_provider.py`, `models/gpt/gpt_builder.py`) and
NeMo 2.4 (`collections/llm/gpt/model/base.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcore_convert.errors import ConfigError
from mcore_convert.spec.config.arguments import YARN_FIELDS
from mcore_convert.spec.config.rope import LLAMA3
from mcore_convert.spec.config.symbols import name_of, plain_fields

Values = Mapping[str, Any]

RENAMED = {
    "num_moe_experts": "num_experts",
    "rope_scaling": "use_rope_scaling",
    "seq_len_interpolation_factor": "rotary_seq_len_interpolation_factor",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    "fp8_param": "fp8_param_gather",
}

# Defaults of fields that differ from Megatron-LM's defaults of the arguments.
DEFAULTS: dict[str, Any] = {
    "gated_linear_unit": False,
    "bias_activation_fusion": False,
    "rope_scaling": False,
}

# Names of the functions; a class of Megatron-Bridge 0.7 uses the short ones.
ACTIVATIONS = {
    "silu": ("silu", "torch.nn.functional.silu"),
    "gelu": ("gelu", "torch.nn.functional.gelu", "torch._C._nn.gelu"),
    # one polynomial under several names; also that of a gelu fused with its bias
    "fast_gelu": (
        "fast_gelu",
        "gelu_pytorch_tanh",
        "megatron.core.activations.fast_gelu",
        "megatron.core.transformer.utils.openai_gelu",
        "nemo.collections.llm.fn.activation.openai_gelu",
    ),
    "squared_relu": (
        "squared_relu",
        "relu2",
        "megatron.core.activations.squared_relu",
        "nemo.collections.llm.fn.activation.squared_relu",
    ),
    "quick_gelu": (
        "quick_gelu",
        "megatron.core.activations.quick_gelu",
        "megatron.core.fusions.fused_bias_geglu.quick_gelu",
        "nemo.collections.llm.fn.activation.quick_gelu",
    ),
}

SIZES = ("num_layers", "hidden_size", "num_attention_heads")
LOCAL_SPECS = ("local_layer_spec", "get_gpt_layer_local_spec")
# llama3's scaling before Megatron Core had it: Megatron-Bridge 0.2 (`Llama31ModelProvider`) and NeMo
# (`Llama31Config`) implement it in the classes with these fields.
LLAMA3_FIELDS = {
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "old_context_len": "original_max_position_embeddings",
}


def arguments_of(model: Values, where: str, *, tied: bool = True) -> dict[str, Any]:
    """Return the arguments of Megatron-LM that are equivalent to a configuration.

    Args:
        tied: whether the class ties embeddings if the configuration does not say so.

    Raises:
        ConfigError: no argument can express the activation or the scaling of positions.
    """
    args = {RENAMED.get(name, name): value for name, value in plain_fields({**DEFAULTS, **model}).items()}
    wrong = [name for name in SIZES if not isinstance(args.get(name), int) or args[name] < 1]
    if wrong:
        raise ConfigError(
            f"{where} does not say the sizes of a model", items=[f"`{name}` = {args.get(name)!r}" for name in wrong]
        )
    heads, groups = args.get("num_attention_heads"), args.get("num_query_groups")
    args["group_query_attention"] = groups is not None and groups != heads
    args["untie_embeddings_and_output_weights"] = not args.pop("share_embeddings_and_output_weights", tied)
    if args.get("seq_length") is not None:
        args["max_position_embeddings"] = args["seq_length"]
    if "persist_layer_norm" in args:
        args["no_persist_layer_norm"] = not args.pop("persist_layer_norm")
    if any(name in str(name_of(model.get("transformer_layer_spec"))) for name in LOCAL_SPECS):
        args["transformer_impl"] = "local"
    if args.get("position_embedding_type") == "yarn" and not args.get("multi_latent_attention"):
        args |= {name: args.pop(attribute, None) for attribute, name in YARN_FIELDS.items()}
    return {**args, **_activation(model, where), **_llama3(model, where)}


def names_activation(model: Values) -> bool:
    """Return whether a configuration names the activation. If it does not, the activation depends on the class that
    omitted it.
    """
    return name_of(model.get("activation_func")) is not None


def _activation(model: Values, where: str) -> dict[str, Any]:
    """Return the arguments for the activation; none if the configuration does not name it."""
    stated = name_of(model.get("activation_func"))
    if stated is None:
        return {}
    gated, fused = bool(model.get("gated_linear_unit")), bool(model.get("bias_activation_fusion"))
    known = next((name for name, spellings in ACTIVATIONS.items() if stated in spellings), None)
    plain = {"swiglu": False, "bias_gelu_fusion": False}
    if known == "silu" and gated:
        return {"swiglu": True, "bias_swiglu_fusion": fused}
    if known == "gelu" and not gated:
        return {**plain, "bias_gelu_fusion": fused}
    if known == "fast_gelu" and not gated and model.get("add_bias_linear", True):
        return {**plain, "bias_gelu_fusion": True}
    if known == "squared_relu" and not gated:
        return {**plain, "squared_relu": True}
    if known == "quick_gelu" and gated:
        return {**plain, "bias_gelu_fusion": fused, "quick_geglu": True}
    raise ConfigError(
        f"no argument of Megatron-LM says the activation in {where}",
        items=[f"`activation_func` = {stated}", f"`gated_linear_unit` = {gated}"],
    )


def _llama3(model: Values, where: str) -> dict[str, Any]:
    """Return the arguments for llama3's scaling of positions, if a class has it in fields of its own."""
    if model.get("scale_factor") is None or any(model.get(name) is None for name in LLAMA3_FIELDS):
        return {}
    other = [f"`{name}` = {model[name]!r}" for name, rope in LLAMA3_FIELDS.items() if model[name] != LLAMA3[rope]]
    if not isinstance(model["scale_factor"], int | float):
        other.append(f"`scale_factor` = {model['scale_factor']!r}")
    if other:
        raise ConfigError(f"Megatron-LM scales rotary positions by other constants than {where}", items=other)
    return {"use_rope_scaling": True, "rope_scaling_factor": float(model["scale_factor"])}
