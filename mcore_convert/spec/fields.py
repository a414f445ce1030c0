"""Fields that several families have and that are more than one value under two names: vocabulary, heads, windows, activation."""

from __future__ import annotations

from typing import Any

from mcore_convert.spec.config import Field, Refused, Values, same, shown, stated


def vocabulary(*, default: int) -> Field:
    """The vocabulary without padding. Where a checkpoint does not tell it, the padded one: no row is dropped."""
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
    """The size of a head, always written; `null` is the hidden size shared by the heads."""
    return same("head_dim", "kv_channels", default=default, null=shared_head_dim)


def shared_head_dim(config: Values) -> int:
    """The hidden size shared by the heads."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    if not isinstance(hidden, int) or not isinstance(heads, int) or heads < 1 or hidden % heads:
        raise Refused(f"`hidden_size` = {shown(hidden)} is not a multiple of `num_attention_heads` = {shown(heads)}")
    return hidden // heads


def sliding_window(*, default: int | None) -> Field:
    """A window that Megatron is not told about: it must cover every position, where it changes nothing."""

    def to_megatron(config: Values) -> dict[str, Any]:
        window, positions = config["sliding_window"], config["max_position_embeddings"]
        if window is not None and not window >= positions:
            raise Refused(f"`sliding_window` = {shown(window)} does not cover `max_position_embeddings` = {positions}")
        return {}

    return Field({"sliding_window": default}, (), to_megatron, lambda _: {"sliding_window": None})


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
        return {hf: TANH[0] if stated(args, "bias_gelu_fusion") else ERF[0]}

    return Field({hf: default}, ("bias_gelu_fusion",), to_megatron, to_hf)
