"""Megatron-LM's arguments as a checkpoint stores them: one spelling for all versions.

Facts are from `megatron/training/arguments.py`, `checkpointing.py` and the tokenizers of Megatron-LM 0.8, 0.12, 0.16.1,
0.19 and main (August 2026).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mcore_convert.errors import ConfigError
from mcore_convert.spec import hybrid, releases
from mcore_convert.spec.layers import GATED_DELTA_NET, GATED_DELTA_NET_IN_SHORT, check_number, plain_frequency

Values = Mapping[str, Any]


@dataclass(frozen=True)
class TorchDtype:
    """A `torch.dtype` by name, so that this module needs no torch; `name` is `bfloat16`, `float16` or `float32`."""

    name: str

    def __str__(self) -> str:
        return f"torch.{self.name}"


DTYPES = {"float32": TorchDtype("float32"), "float16": TorchDtype("float16"), "bfloat16": TorchDtype("bfloat16")}

# Defaults of Megatron-LM's command line; a version that lacks an argument behaves as with its default.
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


# Defaults for latent attention: those of the command line of 0.13 to 0.19 (0.12 stores all of these but `rope_type`),
# and of `MLATransformerConfig` for fields without a flag.
LATENT_DEFAULTS: dict[str, Any] = {
    "rope_type": "yarn",
    "rotary_scaling_factor": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}

# Defaults for other attention with positions scaled by YaRN (0.19, `_apply_yarn_config_from_args`).
YARN_DEFAULTS: dict[str, Any] = {
    **{name: LATENT_DEFAULTS[name] for name in ("rotary_scaling_factor", "mscale", "mscale_all_dim")},
    **{f"yarn_{x}": LATENT_DEFAULTS[x] for x in ("original_max_position_embeddings", "beta_fast", "beta_slow")},
    "yarn_correction_range_round_to_int": True,
}
# Names of Megatron Core's configuration fields -> the names of these arguments.
YARN_FIELDS = {name if name.startswith("yarn_") else f"yarn_{name}": name for name in YARN_DEFAULTS}


def true_vocab_size(stored: Values) -> int | None:
    """Return the vocabulary size without padding, from the arguments in a checkpoint; None if they do not have it.

    The `vocab_size` of `NullTokenizer` excludes the end-of-text token up to Megatron Core 0.17 and is the whole
    vocabulary since 0.18, which also introduced the argument `null_tokenizer_eod_id`. `NullMultimodalTokenizer` still
    excludes it. Other tokenizers have a size of their own, and `vocab_size` is None unless the user gave it.
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
    """Return the arguments without values of Megatron's own classes (enums), which only Megatron can write.

    They say how a run computes, and Megatron uses its default if a checkpoint lacks them.
    """

    def is_plain(value: Any) -> bool:
        if isinstance(value, dict):
            return all(is_plain(part) for item in value.items() for part in item)
        if isinstance(value, list | tuple):
            return all(is_plain(part) for part in value)
        return value is None or isinstance(value, bool | int | float | str | TorchDtype)

    return {name: value for name, value in stored.items() if is_plain(value)}


def padded_vocab_size(vocab: int, tp: int, divisible_by: int = 128) -> int:
    """Return the number of rows of Megatron-LM's embedding: the next multiple of `divisible_by * tp`."""
    multiple = divisible_by * tp
    return -(-vocab // multiple) * multiple


def normalise(stored: Values) -> dict[str, Any]:
    """Return the arguments of any version from 0.8 in the spelling of 0.19, with defaults for None. Idempotent.

    `vocab_size` becomes the vocabulary without padding (`true_vocab_size`). Arguments that an old version lacks get the
    value that corresponds to its behaviour.
    """
    args = dict(stored)
    _rename(args, "norm_epsilon", "layernorm_epsilon")
    _rename(args, "apply_layernorm_1p", "layernorm_zero_centered_gamma")
    _rename(args, "model_parallel_size", "tensor_model_parallel_size")
    _rename(args, "encoder_num_layers", "num_layers")
    check_number(args.get("num_layers"))
    if "disable_bias_linear" in args:
        args["add_bias_linear"] = not args.pop("disable_bias_linear")
    if args.get("use_rotary_position_embeddings"):
        args["position_embedding_type"] = "rope"
    if args.get("experimental_attention_variant") == GATED_DELTA_NET_IN_SHORT:
        args["experimental_attention_variant"] = GATED_DELTA_NET
    for name, value in DEFAULTS.items():
        if args.get(name) is None:
            args[name] = value

    if args.get("multi_latent_attention") and scales_by_all_positions(args):
        _rename(args, "max_position_embeddings", "original_max_position_embeddings")
    of_positions = YARN_DEFAULTS if args["position_embedding_type"] == "yarn" else {}
    for name, value in (LATENT_DEFAULTS if args.get("multi_latent_attention") else of_positions).items():
        if args.get(name) is None:
            args[name] = value
    if args.get("num_experts"):
        args["moe_layer_freq"] = plain_frequency(args.get("moe_layer_freq", 1))
    if args.get("linear_attention_freq") is not None:
        args["linear_attention_freq"] = plain_frequency(args["linear_attention_freq"], "linear_attention_freq")
    if hybrid.is_hybrid(args):
        args |= hybrid.normalised(args)
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


def scales_by_all_positions(stored: Values) -> bool:
    """Return whether the release that stored these arguments lacks original positions for latent attention's YaRN.

    Up to 0.13 it uses `max_position_embeddings` in their place, and scales scores by `mscale`, not `mscale_all_dim`
    (`multi_latent_attention.py`).
    """
    release = releases.of_run(stored)
    return release is not None and release < releases.ORIGINAL_POSITIONS


def _rename(args: dict[str, Any], old: str, new: str) -> None:
    if args.get(new) is None and args.get(old) is not None:
        args[new] = args[old]
