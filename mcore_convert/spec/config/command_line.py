"""Megatron-LM command line of a model: the flags of its architecture, including those that no checkpoint stores."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mcore_convert.spec import hybrid
from mcore_convert.spec.config.arguments import Values, normalise
from mcore_convert.spec.config.flags import ALL, BUFFERS, OPTIMIZER, YARN, Flags, named
from mcore_convert.spec.config.latent import WITHOUT_FLAG
from mcore_convert.spec.config.rope import SCRIPTS_ROPE_SCALING_FACTOR

# PATTERNS: flags with a list of layers, written as one word without spaces. PAIRS: flags with a pair, written without
# brackets, which would have to be quoted in a shell. The lists of other flags become several words.
PATTERNS = ("--moe-layer-freq", "--no-rope-freq", "--window-attn-skip-freq", "--linear-attention-freq")
PAIRS = ("--window-size",)
INTEGERS = ("--rotary-base",)  # a configuration may have a float, such as 10000.0

# Flags that 0.12 lacks, with the version that introduced them.
YOUNG = {"no_rope_freq": "0.13", "window_size": "0.15", "softmax_type": "0.15"}
YOUNG |= {"experimental_attention_variant": "0.16", "attention_output_gate": "0.16"}

# Notes: the script of Megatron-LM that builds a hybrid, and the name of its flag for the pattern of the layers.
SCRIPT = "the model is a hybrid, which `pretrain_mamba.py` builds, called `pretrain_hybrid.py` since 0.18"
NEW_PATTERN = (
    "Megatron-LM has `--hybrid-layer-pattern` since 0.17: --for-megatron 0.16 is for older ones, which know it as "
    "`--hybrid-override-pattern`"
)


def command_line(args: Values, *, optimizer: bool = False) -> list[str]:
    """Return the flags of the architecture, layout, dtype and tokenizer, as Megatron-LM 0.12 to main parse them.

    Some flags are newer, and are included only if the model needs them (`caveats`). Pass all of them with
    `--use-checkpoint-args`, or instead of it.

    Args:
        optimizer: whether a run will resume with its optimizer's state.
    """
    args = {**normalise(args), **(_pattern(args) if hybrid.is_hybrid(args) else {})}
    args["group_query_attention"] = args["num_query_groups"] != args["num_attention_heads"]
    groups = (*ALL, OPTIMIZER, BUFFERS) if optimizer else ALL
    flags = [word for group in groups if group.when(args) for word in _words(group, args)]
    return flags + _tokenizer(args)


def _pattern(stored: Values) -> dict[str, Any]:
    """Return the stored layer pattern of a hybrid, under one of its two names: 0.17 and later refuse both together."""
    pattern = stored.get(hybrid.PATTERN)
    old = stored.get(hybrid.OLD_PATTERN) if pattern is None else None
    layout = stored.get("pipeline_model_parallel_layout")
    return {hybrid.PATTERN: pattern, hybrid.OLD_PATTERN: old, "pipeline_model_parallel_layout": layout}


def _words(group: Flags, args: Values) -> Iterator[str]:
    for flag, (name, value) in group.switches.items():
        if args.get(name) is value:
            yield flag
    for flag, name in group.values.items():
        value = args.get(name)
        if value is not None and value != group.plain.get(flag):
            yield flag
            yield from _texts(flag, value)


def _texts(flag: str, value: Any) -> list[str]:
    if isinstance(value, list | tuple):
        words = [_text(each) for each in value]
        if flag in PAIRS:
            return [",".join(words)]
        return [f"[{','.join(words)}]"] if flag in PATTERNS else words
    if flag in INTEGERS and isinstance(value, float) and value.is_integer():
        return [str(int(value))]
    return [_text(value)]


def caveats(args: Values) -> list[str]:
    """Return one line for each of these arguments that Megatron-LM's training scripts do not support; usually none."""
    lines = [SCRIPT, *([NEW_PATTERN] if args.get(hybrid.PATTERN) else [])] if hybrid.is_hybrid(args) else []
    args = normalise(args)
    factor, linear = args["rope_scaling_factor"], args.get("rotary_seq_len_interpolation_factor")
    if args["use_rope_scaling"] and factor != SCRIPTS_ROPE_SCALING_FACTOR:
        lines.append(
            f"`rope_scaling_factor` = {factor}: `GPTModel` takes it, but `pretrain_gpt.py` of Megatron-LM 0.12 to main "
            f"does not hand it on, and scales by {SCRIPTS_ROPE_SCALING_FACTOR}"
        )
    for (flag, name), since in zip(named(*YOUNG).items(), YOUNG.values(), strict=True):
        if args.get(name) not in (None, False, 0, "vanilla"):
            lines.append(f"`{name}` = {args[name]}: Megatron-LM has `{flag}` since {since}")
    if YARN.when(args):
        lines.append("`position_embedding_type` = yarn: Megatron-LM has its flags since 0.19")
    if args.get("multi_latent_attention") and args["rope_type"] == "yarn" and args["rotary_scaling_factor"] > 1:
        lines += [
            f"`{name}` = {args[name]}: `MLATransformerConfig` takes it, but Megatron-LM has no flag for it, and {value}"
            for name, value in WITHOUT_FLAG.items()
            if args[name] != value
        ]
    if args["position_embedding_type"] == "rope" and linear not in (None, 1):
        lines.append(
            f"`rotary_seq_len_interpolation_factor` = {linear}: `GPTModel` takes it, but `pretrain_gpt.py` of "
            "Megatron-LM does not hand it on before 0.19"
        )
    return lines


def _tokenizer(args: Values) -> list[str]:
    if args.get("tokenizer_model"):
        return ["--tokenizer-type", args["tokenizer_type"], "--tokenizer-model", args["tokenizer_model"]]
    vocab = args.get("vocab_size")
    if vocab is None:
        return []
    # Up to 0.17 NullTokenizer adds one to the size, since 0.18 it does not. Both pad to the same number of rows, and no
    # row is lost, unless the vocabulary needs no padding: one more token would then need a further block of rows.
    multiple = args.get("make_vocab_size_divisible_by", 128) * args.get("tensor_model_parallel_size", 1)
    return ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(vocab if vocab % multiple else vocab - 1)]


def _text(value: Any) -> str:
    return repr(value) if isinstance(value, float) else str(value)
