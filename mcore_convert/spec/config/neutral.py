"""Keys of `config.json` and values of arguments that have no effect on the function of a model.

`NEUTRAL` was compiled from the arguments and `TransformerConfig` of Megatron-LM 0.8, 0.12, 0.16.1, 0.19 and main
(August 2026). Arguments of dropout, initialisation, fusion, precision, parallelism, data and training are not
included: they change how a function is computed or trained, not the function. Arguments that depend on another one
(the sizes of MLA, of experts, of Mamba) are represented by that one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Keys that change no model, with any value. They are those of transformers' base class (`configuration_utils.py` of
# 4.0 to 5.17) for training, running and generation; keys of older versions and other programs: `_num_labels`
# (DistilGPT2), `output_past` and `n_special` (GPT-2 before 3.0), `is_llama_config` (nanotron's SmolLM),
# `transformers.js_config`, `unsloth_*`; and keys that transformers does not read for its own models: `auto_map`, the
# lengths of a tokenizer, the dropout of a head.
INERT = frozenset(
    """
    _name_or_path _commit_hash _attn_implementation attn_implementation transformers_version name_or_path
    _attn_implementation_autoset _attn_implementation_internal _experts_implementation experts_implementation
    _from_model_config _num_labels _output_attentions auto_map transformers.js_config
    is_llama_config output_past n_special predict_special_tokens tie_last_hidden_states xla_device
    unsloth_version unsloth_fixed unsloth_traced use_cache initializer_range gradient_checkpointing pretraining_tp
    classifier_dropout keys_to_ignore_at_inference model_max_length max_sequence_length cache_implementation
    use_flash_attn _flash_attn_2_enabled mask_token_id cls_token_id image_token_id
    renormalize_logits max_new_tokens min_new_tokens min_p penalty_alpha num_assistant_tokens
    bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id decoder_start_token_id tokenizer_class prefix
    id2label label2id num_labels problem_type finetuning_task task_specific_params
    output_hidden_states output_attentions output_scores return_dict return_dict_in_generate
    torchscript use_bfloat16 tf_legacy_loss chunk_size_feed_forward is_decoder cross_attention_hidden_size
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p
    typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    num_return_sequences forced_bos_token_id forced_eos_token_id remove_invalid_values suppress_tokens
    begin_suppress_tokens exponential_decay_length_penalty
    """.split()  # noqa: SIM905 - forty names on ten lines
)

FULL_ATTENTION = "full_attention"

# Keys that any `config.json` may have, and that change the model unless they have this value, or null. Comments name
# the classes of transformers 5.17 that read a key: their families have it in their own tables, and it is here for
# configurations that have it without a meaning.
ONLY: dict[str, Any] = {
    "is_encoder_decoder": False,
    "tie_encoder_decoder": False,
    "add_cross_attention": False,
    "pruned_heads": {},
    "per_layer_config": {},
    "quantization_config": None,
    "compression_config": None,
    "quantization": None,  # of MLX
    "rope_interleaved": False,  # of nanotron: pairs of neighbours instead of halves
    "rope_scaling": None,
    "attention_bias": False,
    "mlp_bias": False,
    "sliding_window": None,
    "use_sliding_window": False,
    "attention_chunk_size": None,
    "qk_layernorm": False,  # Phi, StableLM
    "use_qk_norm": False,
    "use_mrope": False,
    "partial_rotary_factor": 1.0,  # Phi, GLM, Nemotron
    "clip_qkv": None,  # OLMo
    "attn_logit_softcapping": None,  # Gemma 2
    "final_logit_softcapping": None,
    "embedding_multiplier": 1.0,  # Granite
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
    "alibi": False,  # Falcon
    "num_experts": None,
    "num_local_experts": None,
}

# Meaning of such keys whose names do not explain it.
MEANING = {
    "quantization_config": "its weights are quantised",
    "compression_config": "its weights are quantised",
    "quantization": "its weights are quantised",
}


def is_inert(key: str, value: Any) -> bool:
    """Return whether a key of `config.json` that no field of a family covers has no effect."""
    if key == "layer_types":  # of transformers 5: a name for each layer
        return value is None or (isinstance(value, list) and set(value) <= {FULL_ATTENTION})
    return key in INERT or (key in ONLY and value in (None, ONLY[key]))


OFF: tuple[Any, ...] = (None, False)
NOTHING: tuple[Any, ...] = (None, 0)

# Argument -> the values with which it does not change the function of a plain decoder.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    # the block
    "normalization": ("LayerNorm",),
    "apply_residual_connection_post_layernorm": OFF,
    "layernorm_zero_centered_gamma": OFF,
    "add_bias_linear": (True,),
    "add_qkv_bias": OFF,
    "enable_mhc_connections": OFF,
    "enable_gpt_oss": OFF,
    # attention
    "multi_latent_attention": OFF,
    "experimental_attention_variant": (None,),
    "linear_attention_freq": (None,),
    "qk_layernorm": OFF,
    "qk_l2_norm": OFF,
    "export_qk_l2_norm": OFF,
    "attention_output_gate": OFF,
    "softmax_type": (None, "vanilla"),
    "softmax_scale": (None,),
    # -1 to the left is no limit
    "window_size": (None, (-1, -1), (-1, 0)),
    "window_attn_skip_freq": (None,),
    "use_kitchen": OFF,
    "use_kitchen_attention": OFF,
    "kitchen_config_file": (None,),
    "kitchen_recipe_number": (None,),
    "te_precision_config_file": (None,),
    # positions
    "position_embedding_type": ("learned_absolute",),
    "rope_type": (None, "rope"),
    "rotary_percent": (None, 1.0),
    "rotary_interleaved": OFF,
    "rotary_seq_len_interpolation_factor": (None, 1),
    "use_rope_scaling": OFF,
    "mrope_section": (None,),
    "no_rope_freq": NOTHING,
    # the MLP and its activation
    "swiglu": OFF,
    "squared_relu": OFF,
    "quick_geglu": OFF,
    "openai_gelu": OFF,
    "use_te_activation_func": OFF,
    "activation_func_clamp_value": (None,),
    "glu_linear_offset": NOTHING,
    "num_experts": NOTHING,
    # muP
    "use_mup": OFF,
    "mup_embedding_mult": (None, 1.0),
    "mup_output_mult": (None, 1.0),
    "mup_width_mult": (None, 1.0),
    # other models
    "mtp_num_layers": NOTHING,
    "mtp_use_repeated_layer": OFF,
    "is_hybrid_model": OFF,
    "hybrid_layer_pattern": (None,),
    "hybrid_override_pattern": (None,),
    "hybrid_attention_ratio": NOTHING,
    "hybrid_mlp_ratio": NOTHING,
    "mtp_hybrid_override_pattern": (None,),
    "heterogeneous_layers_config_path": (None,),
    "heterogeneous_layers_config_encoded_json": (None,),
    "retro_add_retriever": OFF,
    "use_legacy_models": OFF,
    "spec": (None,),
}


# The same for models with experts; without experts these arguments have no effect. Sizes have no neutral value.
NEUTRAL_OF_EXPERTS: dict[str, tuple[Any, ...]] = {
    "moe_layer_freq": (None, 1),
    "moe_ffn_hidden_size": (None,),
    "moe_latent_size": (None,),
    "moe_mlp_glu_interleave_size": (None,),
    "moe_extended_tp": OFF,
    "moe_single_grouped_weight": OFF,
    "moe_single_grouped_bias": OFF,
    # the router
    "moe_router_topk": (),
    "moe_router_pre_softmax": OFF,
    "moe_router_score_function": (None, "softmax"),
    "moe_router_num_groups": (None,),
    "moe_router_group_topk": (None,),
    "moe_router_topk_limited_devices": (None,),
    "moe_router_topk_scaling_factor": (None, 0, 1),
    "moe_router_enable_expert_bias": OFF,
    "moe_router_force_load_balancing": OFF,
    "moe_router_force_biased": (None,),
    # `sinkhorn` and `quantile_balancing` select other experts
    "moe_router_load_balancing_type": (None, "none", "aux_loss", "seq_aux_loss", "global_aux_loss"),
    "moe_input_jitter_eps": (None,),
    "moe_apply_probs_on_input": OFF,
    "export_moe_apply_probs_on_input": OFF,
    # dropped tokens
    "moe_expert_capacity_factor": (None,),
    "moe_expert_rank_capacity_factor": (None,),
    # the shared expert
    "moe_shared_expert_intermediate_size": NOTHING,
    "moe_shared_expert_gate": OFF,
    "moe_shared_expert_glu_interleave_size": (None,),
}


def not_neutral(args: Mapping[str, Any]) -> list[str]:
    """Return the arguments that are present and change the function of a plain decoder:
    their value is not neutral.
    """
    tables = [NEUTRAL, *([NEUTRAL_OF_EXPERTS] if args.get("num_experts") else [])]
    return [name for table in tables for name in table if name in args and not _is_one_of(table[name], args[name])]


def _is_one_of(values: tuple[Any, ...], value: Any) -> bool:
    if isinstance(value, list):
        value = tuple(value)
    if isinstance(value, tuple) and value and all(isinstance(each, str) for each in value):  # several losses
        return all(each in values for each in value)
    return any(value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in values)
