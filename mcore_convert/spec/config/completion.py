"""The full set of Megatron-LM's arguments that is stored in a checkpoint.

Facts are from `megatron/training/arguments.py` and `checkpointing.py` of Megatron-LM 0.8, 0.12, 0.16.1, 0.19 and main
(August 2026).
"""

from __future__ import annotations

from typing import Any

from mcore_convert.errors import ConfigError
from mcore_convert.spec.config.arguments import DEFAULTS, DTYPES, Values, normalise, padded_vocab_size
from mcore_convert.spec.config.linear import NO_LINEAR_ATTENTION

# Values of a plain run of Megatron-LM for arguments that the architecture does not set. If an attribute is absent or
# None, `--use-checkpoint-args` silently keeps the command line's default; Megatron-Bridge fails on an absent one.
PLAIN: dict[str, Any] = {
    **DEFAULTS,
    "add_position_embedding": True,
    "use_rotary_position_embeddings": False,
    "rotary_seq_len_interpolation_factor": None,
    "apply_query_key_layer_scaling": False,
    "apply_residual_connection_post_layernorm": False,
    "attention_softmax_in_fp32": False,
    "fp32_residual_connection": False,
    "squared_relu": False,
    "quick_geglu": False,
    "openai_gelu": False,
    "activation_func_clamp_value": None,
    "glu_linear_offset": 0.0,
    "multi_latent_attention": False,
    "qk_layernorm": False,
    "qk_l2_norm": False,
    "attention_output_gate": False,
    "softmax_type": "vanilla",
    "window_size": None,
    "window_attn_skip_freq": None,
    "no_rope_freq": None,
    "mrope_section": None,
    **NO_LINEAR_ATTENTION,
    "init_method_std": 0.02,
    "init_method_xavier_uniform": False,
    "init_model_with_meta_device": False,
    # no experts, no multi-token prediction, not a hybrid
    "num_experts": None,
    "moe_layer_freq": 1,
    "moe_ffn_hidden_size": None,
    "moe_grouped_gemm": False,
    "moe_router_topk": 2,
    "moe_router_pre_softmax": False,
    "moe_router_score_function": "softmax",
    "moe_router_enable_expert_bias": False,
    "moe_router_topk_scaling_factor": None,
    "moe_shared_expert_intermediate_size": None,
    "moe_token_dispatcher_type": "allgather",
    "moe_latent_size": None,
    "moe_single_grouped_weight": False,
    "moe_single_grouped_bias": False,
    "mtp_num_layers": None,
    "mtp_use_repeated_layer": False,
    "mtp_hybrid_override_pattern": None,
    "is_hybrid_model": False,
    "hybrid_layer_pattern": None,
    "hybrid_override_pattern": None,
    "hybrid_attention_ratio": 0.0,
    "hybrid_mlp_ratio": 0.0,
    "mamba_state_dim": 128,
    "mamba_head_dim": 64,
    "mamba_num_groups": 8,
    "mamba_num_heads": None,
    "heterogeneous_layers_config_path": None,
    "heterogeneous_layers_config_encoded_json": None,
    "spec": None,
    "use_legacy_models": False,
    # execution
    "transformer_impl": "transformer_engine",
    "bias_swiglu_fusion": True,
    "bias_dropout_fusion": True,
    "masked_softmax_fusion": True,
    "apply_rope_fusion": False,  # True requires Transformer Engine when the configuration is built
    "no_persist_layer_norm": False,
    "fp16_lm_cross_entropy": False,
    "fp8": None,
    "fp8_param_gather": False,
    "overlap_p2p_comm": False,
    "cp_comm_type": ["p2p"],
    "config_logger_dir": "",
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "sequence_parallel": False,
    "data_parallel_size": 1,
    "rank": 0,
    "data_parallel_random_init": False,
    # the checkpoint
    "ckpt_format": "torch_dist",
    "use_dist_ckpt": True,
    "ckpt_fully_parallel_save": False,
    "no_save_optim": True,
    "no_save_rng": True,
    "use_distributed_optimizer": False,
    "consumed_train_samples": 0,
    "consumed_valid_samples": 0,
    "skipped_train_samples": 0,
    "make_vocab_size_divisible_by": 128,
    "vocab_file": None,
    "merge_file": None,
    "vocab_extra_ids": 0,
    "tiktoken_pattern": None,
}


def complete(
    architecture: Values,
    *,
    dtype: str,
    tp: int,
    pp: int,
    vpp: int | None = None,
    iteration: int = 0,
    tokenizer_model: str | None = None,
    vocab_size: int,
) -> dict[str, Any]:
    """Return the `args` to store in a checkpoint: everything that `--use-checkpoint-args` and Megatron-Bridge read.

    `architecture` is the result of a family's mapping of `config.json`; `dtype` is `bfloat16`, `float16` or `float32`;
    `vocab_size` is the true vocabulary. Values are plain, except `TorchDtype`. Without a tokenizer, `tokenizer_type`
    is None: in Megatron-LM a stored one overrides the command line, so `NullTokenizer` would replace the user's.

    Raises:
        ConfigError: a dtype that Megatron does not train in.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"Megatron stores weights as {', '.join(f'`{name}`' for name in DTYPES)}, not `{dtype}`")
    args = normalise({**PLAIN, **architecture})
    stage = pp * vpp if vpp else None
    args |= {
        "vocab_size": vocab_size,
        # divisible by tp: a run that takes it from the checkpoint with another tp checks that
        "padded_vocab_size": padded_vocab_size(vocab_size, tp),
        "make_vocab_size_divisible_by": PLAIN["make_vocab_size_divisible_by"],
        "tokenizer_type": "HuggingFaceTokenizer" if tokenizer_model else None,
        "tokenizer_model": tokenizer_model,
        "seq_length": args["max_position_embeddings"],
        "encoder_seq_length": args["max_position_embeddings"],
        "encoder_num_layers": args["num_layers"],
        "norm_epsilon": args["layernorm_epsilon"],  # the name up to 0.15
        "apply_layernorm_1p": args["layernorm_zero_centered_gamma"],  # the name up to 0.15
        "bf16": dtype == "bfloat16",
        "fp16": dtype == "float16",
        "params_dtype": DTYPES[dtype],
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "transformer_pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": vpp,
        "num_layers_per_virtual_pipeline_stage": args["num_layers"] // stage if stage else None,
        "expert_tensor_parallel_size": tp,
        "world_size": tp * pp,
        "iteration": iteration,
    }
    return args
