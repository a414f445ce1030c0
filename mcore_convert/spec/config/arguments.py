"""Megatron-LM's arguments as a checkpoint stores them: one spelling for all versions, and the full set that we store.

Facts are from `megatron/training/arguments.py`, `checkpointing.py` and the tokenizers of Megatron-LM 0.8, 0.12, 0.16.1,
0.19 and main (August 2026).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mcore_convert.errors import ConfigError
from mcore_convert.spec.config.linear import NO_LINEAR_ATTENTION
from mcore_convert.spec.layers import plain_frequency

Values = Mapping[str, Any]


@dataclass(frozen=True)
class TorchDtype:
    """A `torch.dtype` by name, so that this module needs no torch; `name` is `bfloat16`, `float16` or `float32`."""

    name: str

    def __str__(self) -> str:
        return f"torch.{self.name}"


DTYPES = {"float32": TorchDtype("float32"), "float16": TorchDtype("float16"), "bfloat16": TorchDtype("bfloat16")}

# What the command line of Megatron-LM means by an argument that is not given: a version that lacks it behaves so.
DEFAULTS: dict[str, Any] = {
    "add_bias_linear": True,
    "add_qkv_bias": False,
    "bias_gelu_fusion": True,
    "group_query_attention": False,
    "layernorm_epsilon": 1e-5,
    "layernorm_zero_centered_gamma": False,
    "normalization": "LayerNorm",
    "position_embedding_type": "learned_absolute",
    "rope_scaling_factor": 8.0,
    "rotary_base": 10000,
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "swiglu": False,
    "untie_embeddings_and_output_weights": False,
    "use_rope_scaling": False,
    "attention_dropout": 0.1,
    "hidden_dropout": 0.1,
}


# The same where attention is latent: what the command line of 0.13 to 0.19 means by nothing (that of 0.12 stores all of
# these but `rope_type`), and `MLATransformerConfig` by what has no flag.
LATENT_DEFAULTS: dict[str, Any] = {
    "rope_type": "yarn",
    "rotary_scaling_factor": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}

# The same where it is not, and positions are scaled by YaRN (0.19, `_apply_yarn_config_from_args`).
YARN_DEFAULTS: dict[str, Any] = {
    **{name: LATENT_DEFAULTS[name] for name in ("rotary_scaling_factor", "mscale", "mscale_all_dim")},
    **{f"yarn_{x}": LATENT_DEFAULTS[x] for x in ("original_max_position_embeddings", "beta_fast", "beta_slow")},
    "yarn_correction_range_round_to_int": True,
}
# What a configuration of Megatron Core's calls them.
YARN_FIELDS = {name if name.startswith("yarn_") else f"yarn_{name}": name for name in YARN_DEFAULTS}


def true_vocab_size(stored: Values) -> int | None:
    """The vocabulary without padding, from the arguments that a checkpoint stores; None where they do not tell.

    The `vocab_size` of `NullTokenizer` leaves out the end of text up to Megatron Core 0.17 and is the whole vocabulary
    since 0.18, which is also when the argument `null_tokenizer_eod_id` appeared. `NullMultimodalTokenizer` still
    leaves it out. Other tokenizers bring their own size, and `vocab_size` is None unless the user gave it.
    """
    size = stored.get("vocab_size")
    if size is None:
        return None
    _refuse_no_integers(stored, "vocab_size")
    tokenizer = stored.get("tokenizer_type")
    short = tokenizer == "NullMultimodalTokenizer" or (
        tokenizer == "NullTokenizer" and "null_tokenizer_eod_id" not in stored
    )
    return int(size) + short


def _refuse_no_integers(stored: Values, *names: str) -> None:
    wrong = [f"`{name}` = {stored[name]!r}" for name in names if not isinstance(stored.get(name), int | None)]
    if wrong:
        raise ConfigError("the Megatron arguments do not describe a model", items=wrong)


def plain(stored: Values) -> dict[str, Any]:
    """The arguments without those of Megatron's own classes (enums), which only Megatron could write again.

    They say how a run computes, and Megatron takes its default where a checkpoint does not have them.
    """

    def is_plain(value: Any) -> bool:
        if isinstance(value, dict):
            return all(is_plain(part) for item in value.items() for part in item)
        if isinstance(value, list | tuple):
            return all(is_plain(part) for part in value)
        return value is None or isinstance(value, bool | int | float | str | TorchDtype)

    return {name: value for name, value in stored.items() if is_plain(value)}


def padded_vocab_size(vocab: int, tp: int, divisible_by: int = 128) -> int:
    """The rows that Megatron-LM gives the embedding: the next multiple of `divisible_by * tp`."""
    multiple = divisible_by * tp
    return -(-vocab // multiple) * multiple


def normalise(stored: Values) -> dict[str, Any]:
    """The arguments of any version from 0.8 in the spelling of 0.19, with what may be None resolved. Idempotent.

    `vocab_size` becomes the vocabulary without padding (`true_vocab_size`). Arguments that an old version lacks get the
    value that it behaved by.
    """
    args = dict(stored)
    _rename(args, "norm_epsilon", "layernorm_epsilon")
    _rename(args, "apply_layernorm_1p", "layernorm_zero_centered_gamma")
    _rename(args, "model_parallel_size", "tensor_model_parallel_size")
    _rename(args, "encoder_num_layers", "num_layers")
    if "disable_bias_linear" in args:
        args["add_bias_linear"] = not args.pop("disable_bias_linear")
    if args.get("use_rotary_position_embeddings"):
        args["position_embedding_type"] = "rope"
    for name, value in DEFAULTS.items():
        if args.get(name) is None:
            args[name] = value

    of_positions = YARN_DEFAULTS if args["position_embedding_type"] == "yarn" else {}
    for name, value in (LATENT_DEFAULTS if args.get("multi_latent_attention") else of_positions).items():
        if args.get(name) is None:
            args[name] = value
    if args.get("num_experts"):
        args["moe_layer_freq"] = plain_frequency(args.get("moe_layer_freq", 1))
    if args.get("linear_attention_freq") is not None:
        args["linear_attention_freq"] = plain_frequency(args["linear_attention_freq"], "linear_attention_freq")
    if (vocab := true_vocab_size(args)) is not None:
        if vocab != args["vocab_size"]:
            args["tokenizer_type"], args["null_tokenizer_eod_id"] = "NullTokenizer", args["vocab_size"]
        args["vocab_size"] = vocab

    _refuse_no_integers(args, "hidden_size", "num_attention_heads")
    hidden, heads = args.get("hidden_size"), args.get("num_attention_heads")
    if heads and (args.get("num_query_groups") is None or not args["group_query_attention"]):
        args["num_query_groups"] = heads
    if args.get("kv_channels") is None and hidden and heads:
        args["kv_channels"] = hidden // heads
    if args.get("ffn_hidden_size") is None and hidden:
        # a gated MLP has three matrices instead of two, hence two thirds, rounded down to a multiple of 64
        args["ffn_hidden_size"] = int((4 * hidden * 2 / 3) / 64) * 64 if args["swiglu"] else 4 * hidden
    if args.get("num_experts") and args.get("moe_ffn_hidden_size") is None:
        args["moe_ffn_hidden_size"] = args.get("ffn_hidden_size")
    return args


def _rename(args: dict[str, Any], old: str, new: str) -> None:
    if args.get(new) is None and args.get(old) is not None:
        args[new] = args[old]


# What a plain run of Megatron-LM has where the architecture says nothing. `--use-checkpoint-args` keeps the default of
# the command line without a word where an attribute is absent or None, and Megatron-Bridge fails on an absent one.
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
    # experts, prediction of several tokens, hybrids: none
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
    # how it runs
    "transformer_impl": "transformer_engine",
    "bias_swiglu_fusion": True,
    "bias_dropout_fusion": True,
    "masked_softmax_fusion": True,
    "apply_rope_fusion": False,  # True needs Transformer Engine where the configuration is built
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
    """The content of the `args` to store, so that `--use-checkpoint-args` and Megatron-Bridge find all they read.

    `architecture` is what a family's mapping made of `config.json`; `dtype` is `bfloat16`, `float16` or `float32`;
    `vocab_size` is the true vocabulary. Values are plain, but for `TorchDtype`. Without a tokenizer `tokenizer_type`
    is None: Megatron-LM forces a stored one over the command line, and `NullTokenizer` would displace the user's.

    Raises:
        ConfigError: a dtype that Megatron does not train in.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"Megatron stores weights as {', '.join(f'`{name}`' for name in DTYPES)}, not `{dtype}`")
    args = normalise({**PLAIN, **architecture})
    stage = pp * vpp if vpp else None
    args |= {
        "vocab_size": vocab_size,
        # divisible by the run's tp: a run that takes it over with another tp checks that
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
