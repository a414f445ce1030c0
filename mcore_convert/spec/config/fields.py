"""Kinds of fields for the configuration tables of families, from one value under two names to the form of gelu."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from mcore_convert.spec.config.mapping import ABSENT, REQUIRED, Field, Refused, Values, shown


def stated(args: Values, name: str) -> Any:
    """Return the value of a required argument."""
    if args.get(name) is None:
        raise Refused(f"`{name}` is missing")
    return args[name]


def _nothing(_: Values) -> dict[str, Any]:
    return {}


def same(
    hf: str,
    megatron: str,
    *,
    kind: type = int,
    default: Any = REQUIRED,
    null: Callable[[Values], Any] | None = None,
) -> Field:
    """Return the field of one value under two names. `null` computes the value that `null` stands for
    from the rest of `config.json`.
    """

    def to_megatron(config: Values) -> dict[str, Any]:
        value = config[hf]
        if value is None and null is not None:
            value = null(config)
        return {megatron: _checked(hf, value, kind)}

    def to_hf(args: Values) -> dict[str, Any]:
        return {hf: _checked(megatron, stated(args, megatron), kind)}

    return Field({hf: default}, (megatron,), to_megatron, to_hf)


def negated(hf: str, megatron: str, *, default: bool) -> Field:
    """Return the field of a switch that is negated between the two sides."""

    def to_megatron(config: Values) -> dict[str, Any]:
        return {megatron: not _checked(hf, config[hf], bool)}

    return Field({hf: default}, (megatron,), to_megatron, lambda args: {hf: not stated(args, megatron)})


def only(hf: str, value: Any, *, default: Any = ABSENT, write: bool = True) -> Field:
    """Return the field of a key of `config.json` of which Megatron can represent one value only,
    by default also the meaning of an absent key.
    """

    def to_megatron(config: Values) -> dict[str, Any]:
        if config[hf] != value:
            raise Refused(f"`{hf}` = {shown(config[hf])}, only {shown(value)} can be represented")
        return {}

    absent = value if default is ABSENT else default
    return Field({hf: absent}, (), to_megatron, lambda _: {hf: value} if write else {})


def constant(**values: Any) -> Field:
    """Return the field of arguments of which the family can represent one value only."""

    def to_hf(args: Values) -> dict[str, Any]:
        wrong = [name for name in values if args.get(name) != values[name]]
        if wrong:
            raise Refused(*(f"`{name}` = {args.get(name)!r}, the family has {values[name]!r}" for name in wrong))
        return {}

    return Field({}, tuple(values), lambda _: dict(values), to_hf)


def written(**values: Any) -> Field:
    """Return the field of arguments that an import sets and an export ignores."""
    return Field({}, tuple(values), lambda _: dict(values), _nothing)


def unused(*names: str) -> Field:
    """Return the field of arguments that change the function of other families, but not of this one."""
    return Field({}, names, _nothing, _nothing)


def inert(**defaults: Any) -> Field:
    """Return the field of keys of `config.json` without effect, with their class defaults; they are not written."""
    return Field(defaults, (), _nothing, _nothing)


def blank(*names: str) -> Field:
    """Return the field of keys without effect, written as `null`: their class default would be a guess."""
    return Field(dict.fromkeys(names), (), _nothing, lambda _: dict.fromkeys(names))


def dtype() -> Field:
    """Return the field of the dtype of the weights. transformers 4 writes `torch_dtype`, 5 writes `dtype`;
    both read `torch_dtype`.
    """
    flags: dict[str, tuple[bool, ...]] = {
        "float32": (False, False),
        "float16": (True, False),
        "bfloat16": (False, True),
    }

    def to_megatron(config: Values) -> dict[str, Any]:
        names = {str(config[key]).removeprefix("torch.") for key in ("torch_dtype", "dtype") if config[key] is not None}
        if len(names) > 1 or names - flags.keys() - {"auto"}:
            raise Refused(f"`torch_dtype` = {' and '.join(sorted(names))}")
        fp16_bf16 = next((flags[name] for name in names - {"auto"}), ())
        return dict(zip(("fp16", "bf16"), fp16_bf16, strict=False))

    def to_hf(args: Values) -> dict[str, Any]:
        return {"torch_dtype": "bfloat16" if args.get("bf16") else "float16" if args.get("fp16") else "float32"}

    return Field({"torch_dtype": None, "dtype": None}, ("fp16", "bf16"), to_megatron, to_hf)


def _checked(name: str, value: Any, kind: type) -> Any:
    """Return the value if it has the type that both sides expect: an integer passes as a float, a bool not as one."""
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        if not math.isfinite(value):
            raise Refused(f"`{name}` = {shown(value)} is not a finite number")
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise Refused(f"`{name}` = {shown(value)} is not {'an' if kind is int else 'a'} {kind.__name__}")
    return value


def vocabulary(*, default: int) -> Field:
    """Return the field of the vocabulary size without padding. A checkpoint that lacks it gives the padded size,
    so that no row is dropped.
    """
    size = same("vocab_size", "vocab_size", default=default)

    def to_hf(args: Values) -> dict[str, Any]:
        if args.get("vocab_size") is None:
            args = {"vocab_size": stated(args, "padded_vocab_size")}
        return size.to_hf(args)

    return Field(size.hf, size.megatron, size.to_megatron, to_hf)


def query_groups(*, default: int | None = None) -> Field:
    """Return the field of grouped-query attention, in Megatron a switch and a number; `null` is one group per head."""
    count = same("num_key_value_heads", "num_query_groups", default=default, null=lambda c: c["num_attention_heads"])

    def to_megatron(config: Values) -> dict[str, Any]:
        args = count.to_megatron(config)
        return {**args, "group_query_attention": args["num_query_groups"] != config["num_attention_heads"]}

    return Field(count.hf, ("num_query_groups", "group_query_attention"), to_megatron, count.to_hf)


def head_dim(*, default: int | None = None) -> Field:
    """Return the field of the head size, always written; `null` is the hidden size divided by the number of heads."""
    return same("head_dim", "kv_channels", default=default, null=shared_head_dim)


def shared_head_dim(config: Values) -> int:
    """Return the hidden size divided by the number of heads."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    if not isinstance(hidden, int) or not isinstance(heads, int) or heads < 1 or hidden % heads:
        raise Refused(f"`hidden_size` = {shown(hidden)} is not a multiple of `num_attention_heads` = {shown(heads)}")
    return hidden // heads


def sliding_window(*, default: int | None, switch: str | None = None) -> Field:
    """Return the field of a window in all layers. transformers counts the current position, Megatron only earlier ones.

    A window that covers every position has no effect, and is not passed to Megatron.

    Args:
        switch: the key that enables the window; off by default.
    """

    def to_megatron(config: Values) -> dict[str, Any]:
        window, positions = config["sliding_window"], config["max_position_embeddings"]
        if switch is not None and not _checked(switch, config[switch], bool):
            window = None
        if window is None or (window >= positions and not isinstance(window, bool)):
            return {"window_size": None}
        if _checked("sliding_window", window, int) < 1:
            raise Refused(f"`sliding_window` = {window} sees no position")
        return {"window_size": [window - 1, 0]}

    def to_hf(args: Values) -> dict[str, Any]:
        before, after = args.get("window_size") or (-1, 0)
        if after not in (0, -1):
            raise Refused(f"`window_size` = {args['window_size']}, positions that come later are never seen")
        own = {} if switch is None else {switch: before >= 0}
        return {**own, "sliding_window": None if before < 0 else before + 1}

    keys = {"sliding_window": default, **({} if switch is None else {switch: False})}
    return Field(keys, ("window_size",), to_megatron, to_hf)


def optional_window(*, default: int | None = 4096) -> Field:
    """Return the field of Qwen's window, with a switch and from `max_window_layers` on: off, or without effect."""
    defaults = {"use_sliding_window": False, "sliding_window": default, "max_window_layers": 28, "layer_types": None}

    def to_megatron(config: Values) -> dict[str, Any]:
        kinds = config["layer_types"]
        if kinds is not None and set(kinds) - {"full_attention"}:
            raise Refused(f"`layer_types` = {shown(kinds)}, only `full_attention` can be represented")
        window, positions = config["sliding_window"], config["max_position_embeddings"]
        reached = kinds is None and config["max_window_layers"] < config["num_hidden_layers"]
        if config["use_sliding_window"] and window is not None and reached and window < positions:
            raise Refused(f"`sliding_window` = {shown(window)} does not cover `max_position_embeddings` = {positions}")
        return {}

    return Field(defaults, (), to_megatron, lambda _: {"use_sliding_window": False})


def shared_heads() -> Field:
    """Return the field of heads that divide the hidden size, in a class without `head_dim`."""

    def to_hf(args: Values) -> dict[str, Any]:
        count, hidden = stated(args, "num_attention_heads"), stated(args, "hidden_size")
        if args.get("kv_channels") is not None and args["kv_channels"] * count != hidden:
            raise Refused(f"`kv_channels` = {args['kv_channels']}, the family has `hidden_size` shared by the heads")
        return {}

    return Field({}, ("kv_channels",), lambda config: {"kv_channels": shared_head_dim(config)}, to_hf)


def ungrouped() -> Field:
    """Return the field of attention with as many key and value heads as query heads."""

    def to_megatron(config: Values) -> dict[str, Any]:
        return {"num_query_groups": config["num_attention_heads"], "group_query_attention": False}

    def to_hf(args: Values) -> dict[str, Any]:
        if args.get("num_query_groups", args["num_attention_heads"]) != args["num_attention_heads"]:
            raise Refused(f"`num_query_groups` = {args['num_query_groups']}, the family has one for each head")
        return {}

    return Field({}, ("num_query_groups", "group_query_attention"), to_megatron, to_hf)


# transformers' names of the two forms of gelu; the first is written.
ERF = ("gelu", "gelu_python")
TANH = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")


def gelu(hf: str, *, default: str) -> Field:
    """Return the field of gelu without a gate: Megatron uses the erf form, or the tanh form if fused with the bias."""

    def to_megatron(config: Values) -> dict[str, Any]:
        if config[hf] not in ERF + TANH:
            raise Refused(f"`{hf}` = {shown(config[hf])}")
        return {"bias_gelu_fusion": config[hf] in TANH}

    def to_hf(args: Values) -> dict[str, Any]:
        names = TANH if stated(args, "bias_gelu_fusion") else ERF
        return {hf: default if default in names else names[0]}

    return Field({hf: default}, ("bias_gelu_fusion",), to_megatron, to_hf)
