"""The kinds of fields that the tables of families are made of, from one value under two names to the form of gelu."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from mcore_convert.spec.config.mapping import ABSENT, REQUIRED, Field, Refused, Values, shown


def stated(args: Values, name: str) -> Any:
    """Return the value of an argument that must be there."""
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
    """Return the field of the same value under two names. `null` says what `null` stands for,
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
    """Return the field of a switch that the two sides name in opposite senses."""

    def to_megatron(config: Values) -> dict[str, Any]:
        return {megatron: not _checked(hf, config[hf], bool)}

    return Field({hf: default}, (megatron,), to_megatron, lambda args: {hf: not stated(args, megatron)})


def only(hf: str, value: Any, *, default: Any = ABSENT, write: bool = True) -> Field:
    """Return the field of a key of `config.json` with one value that Megatron represents,
    which is what its absence means by default.
    """

    def to_megatron(config: Values) -> dict[str, Any]:
        if config[hf] != value:
            raise Refused(f"`{hf}` = {shown(config[hf])}, only {shown(value)} can be represented")
        return {}

    absent = value if default is ABSENT else default
    return Field({hf: absent}, (), to_megatron, lambda _: {hf: value} if write else {})


def constant(**values: Any) -> Field:
    """Arguments with one value that the family represents."""

    def to_hf(args: Values) -> dict[str, Any]:
        wrong = [name for name in values if args.get(name) != values[name]]
        if wrong:
            raise Refused(*(f"`{name}` = {args.get(name)!r}, the family has {values[name]!r}" for name in wrong))
        return {}

    return Field({}, tuple(values), lambda _: dict(values), to_hf)


def written(**values: Any) -> Field:
    """Arguments that an import sets and that change nothing coming back."""
    return Field({}, tuple(values), lambda _: dict(values), _nothing)


def unused(*names: str) -> Field:
    """Arguments that change the function of other families, but not of this one."""
    return Field({}, names, _nothing, _nothing)


def inert(**defaults: Any) -> Field:
    """Keys of `config.json` that change no function, with their class defaults; they are not written."""
    return Field(defaults, (), _nothing, _nothing)


def blank(*names: str) -> Field:
    """Keys that change no function, written as `null`: their class default would be a guess."""
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
    """Return the value, where its type is what both sides expect; an integer is a float, a bool is no integer."""
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        if not math.isfinite(value):
            raise Refused(f"`{name}` = {shown(value)} is not a finite number")
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise Refused(f"`{name}` = {shown(value)} is not {'an' if kind is int else 'a'} {kind.__name__}")
    return value


def vocabulary(*, default: int) -> Field:
    """Return the field of the vocabulary without padding. Where a checkpoint does not tell it, the padded one:
    no row is dropped.
    """
    size = same("vocab_size", "vocab_size", default=default)

    def to_hf(args: Values) -> dict[str, Any]:
        if args.get("vocab_size") is None:
            args = {"vocab_size": stated(args, "padded_vocab_size")}
        return size.to_hf(args)

    return Field(size.hf, size.megatron, size.to_megatron, to_hf)


def query_groups(*, default: int | None = None) -> Field:
    """Grouped-query attention, which Megatron switches on beside the number of groups; `null` is one group a head."""
    count = same("num_key_value_heads", "num_query_groups", default=default, null=lambda c: c["num_attention_heads"])

    def to_megatron(config: Values) -> dict[str, Any]:
        args = count.to_megatron(config)
        return {**args, "group_query_attention": args["num_query_groups"] != config["num_attention_heads"]}

    return Field(count.hf, ("num_query_groups", "group_query_attention"), to_megatron, count.to_hf)


def head_dim(*, default: int | None = None) -> Field:
    """Return the field of the size of a head, always written; `null` is the hidden size shared by the heads."""
    return same("head_dim", "kv_channels", default=default, null=shared_head_dim)


def shared_head_dim(config: Values) -> int:
    """Return the hidden size shared by the heads."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    if not isinstance(hidden, int) or not isinstance(heads, int) or heads < 1 or hidden % heads:
        raise Refused(f"`hidden_size` = {shown(hidden)} is not a multiple of `num_attention_heads` = {shown(heads)}")
    return hidden // heads


def sliding_window(*, default: int | None, switch: str | None = None) -> Field:
    """Return the field of a window over all layers. transformers counts the position itself, Megatron those before it.

    A window that covers every position changes nothing, and Megatron is not told of it.

    Args:
        switch: the key without which there is no window; off by default.
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
    """Qwen's window, which has a switch and is for the layers from `max_window_layers` on: off, or without effect."""
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
    """Heads that share the hidden size, in a class that has no `head_dim`."""

    def to_hf(args: Values) -> dict[str, Any]:
        count, hidden = stated(args, "num_attention_heads"), stated(args, "hidden_size")
        if args.get("kv_channels") is not None and args["kv_channels"] * count != hidden:
            raise Refused(f"`kv_channels` = {args['kv_channels']}, the family has `hidden_size` shared by the heads")
        return {}

    return Field({}, ("kv_channels",), lambda config: {"kv_channels": shared_head_dim(config)}, to_hf)


def ungrouped() -> Field:
    """As many key and value heads as query heads."""

    def to_megatron(config: Values) -> dict[str, Any]:
        return {"num_query_groups": config["num_attention_heads"], "group_query_attention": False}

    def to_hf(args: Values) -> dict[str, Any]:
        if args.get("num_query_groups", args["num_attention_heads"]) != args["num_attention_heads"]:
            raise Refused(f"`num_query_groups` = {args['num_query_groups']}, the family has one for each head")
        return {}

    return Field({}, ("num_query_groups", "group_query_attention"), to_megatron, to_hf)


# transformers' names of the two forms of gelu; the first is the one that is written.
ERF = ("gelu", "gelu_python")
TANH = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")


def gelu(hf: str, *, default: str) -> Field:
    """Megatron's gelu without a gate: the exact erf form, but the tanh form where it is fused with the bias."""

    def to_megatron(config: Values) -> dict[str, Any]:
        if config[hf] not in ERF + TANH:
            raise Refused(f"`{hf}` = {shown(config[hf])}")
        return {"bias_gelu_fusion": config[hf] in TANH}

    def to_hf(args: Values) -> dict[str, Any]:
        names = TANH if stated(args, "bias_gelu_fusion") else ERF
        return {hf: default if default in names else names[0]}

    return Field({hf: default}, ("bias_gelu_fusion",), to_megatron, to_hf)
