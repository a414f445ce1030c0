"""The fields of models with experts: how many there are, which layers have them, how a router weighs what they say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mcore_convert.spec.config.fields import same, stated
from mcore_convert.spec.config.mapping import Field, Refused, Values, shown
from mcore_convert.spec.layers import expert_layers


def num_experts(key: str, *, other: str, default: int) -> Field:
    """How many experts a layer has. Versions of transformers differ in the name; the first one is written."""

    def to_megatron(config: Values) -> dict[str, Any]:
        said = {name: config[name] for name in (key, other) if config[name] is not None}
        if len(set(map(repr, said.values()))) > 1:
            raise Refused(" and ".join(f"`{name}` = {shown(value)}" for name, value in said.items()) + " differ")
        name, count = next(iter(said.items()), (key, default))
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise Refused(f"`{name}` = {shown(count)} is not a number of experts")
        return {"num_experts": count}

    def to_hf(args: Values) -> dict[str, Any]:
        return {key: stated(args, "num_experts")}

    return Field({key: None, other: None}, ("num_experts",), to_megatron, to_hf)


def sparse_layers() -> Field:
    """Which layers have experts: every `decoder_sparse_step`th, but for `mlp_only_layers`."""

    def to_megatron(config: Values) -> dict[str, Any]:
        step, without, count = (
            config["decoder_sparse_step"],
            config["mlp_only_layers"] or [],
            config["num_hidden_layers"],
        )
        if isinstance(step, bool) or not isinstance(step, int) or step < 1:
            raise Refused(f"`decoder_sparse_step` = {shown(step)} is not a number of layers")
        if not isinstance(without, list) or not all(type(layer) is int for layer in without):
            raise Refused(f"`mlp_only_layers` = {shown(without)} is not a list of layers")
        pattern = [int((layer + 1) % step == 0 and layer not in without) for layer in range(count)]
        if not any(pattern):
            said = f"`decoder_sparse_step` = {step} and `mlp_only_layers` = {shown(without)}"
            raise Refused(f"{said} leave no layer with experts")
        return {"moe_layer_freq": 1 if all(pattern) else pattern}

    def to_hf(args: Values) -> dict[str, Any]:
        pattern = expert_layers(args.get("moe_layer_freq"), stated(args, "num_layers"))
        return {"decoder_sparse_step": 1, "mlp_only_layers": [n for n, sparse in enumerate(pattern) if not sparse]}

    return Field({"decoder_sparse_step": 1, "mlp_only_layers": None}, ("moe_layer_freq",), to_megatron, to_hf)


def every_layer() -> Field:
    """All layers have experts."""

    def to_hf(args: Values) -> dict[str, Any]:
        if not all(expert_layers(args.get("moe_layer_freq"), stated(args, "num_layers"))):
            raise Refused(f"`moe_layer_freq` = {args['moe_layer_freq']!r}, the family has experts in every layer")
        return {}

    return Field({}, ("moe_layer_freq",), lambda _: {"moe_layer_freq": 1}, to_hf)


def router(*, default: int, normed: bool | None = None) -> Field:
    """How many experts see a token, and whether their weights are made to sum to one (`norm_topk_prob`).

    A softmax over all experts, then normed over the chosen ones, is the softmax over the chosen ones alone: Megatron's
    `moe_router_pre_softmax` is its opposite. Megatron Core refuses the latter for one expert a token, whose weight
    would always be one (0.16.1, `transformer_config.py`).

    Args:
        normed: what the class always does; None where `norm_topk_prob` says it, by default false.
    """
    keys: dict[str, Any] = {"num_experts_per_tok": default} | ({"norm_topk_prob": False} if normed is None else {})
    names = ("moe_router_topk", "moe_router_pre_softmax", "moe_router_score_function")
    count: Callable[[Values], dict[str, Any]] = same(
        "num_experts_per_tok", "moe_router_topk", default=default
    ).to_megatron

    def to_megatron(config: Values) -> dict[str, Any]:
        is_normed = config["norm_topk_prob"] if normed is None else normed
        topk = count(config)["moe_router_topk"]
        if not isinstance(is_normed, bool):
            raise Refused(f"`norm_topk_prob` = {shown(is_normed)} is not a bool")
        if topk < 1:
            raise Refused(f"`num_experts_per_tok` = {topk} is not a number of experts")
        if topk == 1 and is_normed:
            raise Refused("`num_experts_per_tok` = 1 with weights that are normed, which Megatron Core refuses")
        return {
            "moe_router_topk": topk,
            "moe_router_pre_softmax": not is_normed,
            "moe_router_score_function": "softmax",
        }

    def to_hf(args: Values) -> dict[str, Any]:
        score, before = args.get("moe_router_score_function") or "softmax", bool(args.get("moe_router_pre_softmax"))
        if score != "softmax":
            raise Refused(f"`moe_router_score_function` = {score!r}, the family has 'softmax'")
        if normed is not None and before is normed:
            raise Refused(f"`moe_router_pre_softmax` = {before}, the family has {not normed}")
        own = {} if normed is not None else {"norm_topk_prob": not before}
        return {"num_experts_per_tok": stated(args, "moe_router_topk"), **own}

    return Field(keys, names, to_megatron, to_hf)


def expert_size(key: str, *, default: int, of_mlp: bool = False) -> Field:
    """The size between the two matrices of an expert.

    Args:
        of_mlp: the class has no other MLP; Megatron's own size of one then is the same.
    """
    size = same(key, "moe_ffn_hidden_size", default=default)
    if not of_mlp:
        return size

    def to_megatron(config: Values) -> dict[str, Any]:
        args = size.to_megatron(config)
        return {**args, "ffn_hidden_size": args["moe_ffn_hidden_size"]}

    return Field(size.hf, ("moe_ffn_hidden_size", "ffn_hidden_size"), to_megatron, size.to_hf)


def shared_expert(*, default: int) -> Field:
    """The expert that sees every token, behind a gate of its own."""
    size = same("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", default=default)

    def to_megatron(config: Values) -> dict[str, Any]:
        return {**size.to_megatron(config), "moe_shared_expert_gate": True}

    def to_hf(args: Values) -> dict[str, Any]:
        if not args.get("moe_shared_expert_gate"):
            raise Refused("`moe_shared_expert_gate` = False, the family has True")
        return size.to_hf(args)

    return Field(size.hf, (*size.megatron, "moe_shared_expert_gate"), to_megatron, to_hf)
