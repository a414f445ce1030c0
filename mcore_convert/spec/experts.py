"""Fields of models with experts: their number, the layers that have them, and the router's weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mcore_convert.spec.config.fields import same, stated
from mcore_convert.spec.config.mapping import Field, Refused, Values, shown
from mcore_convert.spec.layers import expert_layers


def num_experts(key: str, *, other: str, default: int) -> Field:
    """Return the field of the number of experts. Its name differs between versions of transformers;
    `key` is written.
    """

    def to_megatron(config: Values) -> dict[str, Any]:
        stated = {name: config[name] for name in (key, other) if config[name] is not None}
        if len(set(map(repr, stated.values()))) > 1:
            raise Refused(" and ".join(f"`{name}` = {shown(value)}" for name, value in stated.items()) + " differ")
        name, count = next(iter(stated.items()), (key, default))
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise Refused(f"`{name}` = {shown(count)} is not a number of experts")
        return {"num_experts": count}

    def to_hf(args: Values) -> dict[str, Any]:
        return {key: stated(args, "num_experts")}

    return Field({key: None, other: None}, ("num_experts",), to_megatron, to_hf)


def sparse_layers() -> Field:
    """Return the field of the layers with experts: every `decoder_sparse_step`-th one, except `mlp_only_layers`."""

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
            stated = f"`decoder_sparse_step` = {step} and `mlp_only_layers` = {shown(without)}"
            raise Refused(f"{stated} leave no layer with experts")
        return {"moe_layer_freq": 1 if all(pattern) else pattern}

    def to_hf(args: Values) -> dict[str, Any]:
        pattern = expert_layers(args.get("moe_layer_freq"), stated(args, "num_layers"))
        return {"decoder_sparse_step": 1, "mlp_only_layers": [n for n, sparse in enumerate(pattern) if not sparse]}

    return Field({"decoder_sparse_step": 1, "mlp_only_layers": None}, ("moe_layer_freq",), to_megatron, to_hf)


def every_layer() -> Field:
    """Return the field of a model that has experts in all layers."""

    def to_hf(args: Values) -> dict[str, Any]:
        if not all(expert_layers(args.get("moe_layer_freq"), stated(args, "num_layers"))):
            raise Refused(f"`moe_layer_freq` = {args['moe_layer_freq']!r}, the family has experts in every layer")
        return {}

    return Field({}, ("moe_layer_freq",), lambda _: {"moe_layer_freq": 1}, to_hf)


def router(*, default: int | None, normed: bool | None = None) -> Field:
    """Return the field of the number of experts per token,
    and whether their weights are normalised (`norm_topk_prob`).

    A softmax over all experts, normalised over the selected ones, equals the softmax over the selected ones:
    Megatron's `moe_router_pre_softmax` is the opposite. Megatron Core refuses the latter for one expert per token,
    whose weight would always be one (0.16.1, `transformer_config.py`).

    Args:
        normed: whether the class always normalises; None if `norm_topk_prob` decides, by default false.
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
    """Return the field of the intermediate size of an expert.

    Args:
        of_mlp: the class has no other MLP; Megatron's size of the MLP is then set to the same value.
    """
    size = same(key, "moe_ffn_hidden_size", default=default)
    if not of_mlp:
        return size

    def to_megatron(config: Values) -> dict[str, Any]:
        args = size.to_megatron(config)
        return {**args, "ffn_hidden_size": args["moe_ffn_hidden_size"]}

    return Field(size.hf, ("moe_ffn_hidden_size", "ffn_hidden_size"), to_megatron, size.to_hf)


def first_dense_layers(*, default: int) -> Field:
    """Return the field of the number of layers without experts, which come before all layers with experts."""

    def to_megatron(config: Values) -> dict[str, Any]:
        dense, count, step = config["first_k_dense_replace"], config["num_hidden_layers"], config["moe_layer_freq"]
        if type(dense) is not int or not 0 <= dense < count:
            raise Refused(f"`first_k_dense_replace` = {shown(dense)} leaves none of {count} layers with experts")
        if step != 1:
            raise Refused(f"`moe_layer_freq` = {shown(step)}, only 1 can be represented")
        return {"moe_layer_freq": [0] * dense + [1] * (count - dense) if dense else 1}

    def to_hf(args: Values) -> dict[str, Any]:
        pattern = expert_layers(args.get("moe_layer_freq"), stated(args, "num_layers"))
        if sorted(pattern) != pattern or not any(pattern):
            raise Refused(f"`moe_layer_freq` = {args['moe_layer_freq']!r}, the family has layers without experts first")
        return {"first_k_dense_replace": pattern.index(True), "moe_layer_freq": 1}

    return Field({"first_k_dense_replace": default, "moe_layer_freq": 1}, ("moe_layer_freq",), to_megatron, to_hf)


def shared_experts(*, default: int) -> Field:
    """Return the field of the number of shared experts: one MLP of that many times the size of an expert."""

    def to_megatron(config: Values) -> dict[str, Any]:
        count, size = config["n_shared_experts"], config["moe_intermediate_size"]
        if type(count) is not int or count < 1 or type(size) is not int:
            raise Refused(f"`n_shared_experts` = {shown(count)} of size {shown(size)} is not a number of experts")
        return {"moe_shared_expert_intermediate_size": count * size, "moe_shared_expert_gate": False}

    def to_hf(args: Values) -> dict[str, Any]:
        size, one = args.get("moe_shared_expert_intermediate_size") or 0, stated(args, "moe_ffn_hidden_size")
        if not size or size % one:
            raise Refused(f"`moe_shared_expert_intermediate_size` = {size} is no multiple of the {one} of an expert")
        if args.get("moe_shared_expert_gate"):
            raise Refused("`moe_shared_expert_gate` = True, the family has False")
        return {"n_shared_experts": size // one}

    names = ("moe_shared_expert_intermediate_size", "moe_shared_expert_gate")
    return Field({"n_shared_experts": default}, names, to_megatron, to_hf)


def scaled_weights(*, default: float) -> Field:
    """Return the field of the factor on the weights of selected experts; for Megatron, 0 and None mean 1."""
    factor = same("routed_scaling_factor", "moe_router_topk_scaling_factor", kind=float, default=default)

    def to_megatron(config: Values) -> dict[str, Any]:
        if config["routed_scaling_factor"] == 0:
            raise Refused(
                f"`routed_scaling_factor` = {shown(config['routed_scaling_factor'])}, which Megatron takes for 1"
            )
        return factor.to_megatron(config)

    def to_hf(args: Values) -> dict[str, Any]:
        return {"routed_scaling_factor": float(args.get("moe_router_topk_scaling_factor") or 1.0)}

    return Field(factor.hf, factor.megatron, to_megatron, to_hf)


def expert_groups(*, best: int, default: tuple[int | None, int | None], method: tuple[str, str]) -> Field:
    """Return the field of expert groups: the router selects groups first, and then experts within them.

    Megatron Core scores a group by the sum of its best `moe_router_topk // moe_router_group_topk` experts
    (`moe_utils.py`, `group_limited_topk`), and transformers by that of its best two, or one. Groups have no effect if
    all of them are selected, or as many groups as experts, which are then the best of all.

    Args:
        best: how many experts' scores the class adds up.
        default: `n_group` and `topk_group` of the class.
        method: `topk_method` without groups, the class's default, and with groups.
    """
    keys = ("n_group", "topk_group")
    names = ("moe_router_num_groups", "moe_router_group_topk")

    def to_megatron(config: Values) -> dict[str, Any]:
        count, chosen, topk = config["n_group"], config["topk_group"], config["num_experts_per_tok"]
        if config["topk_method"] not in method:
            raise Refused(f"`topk_method` = {shown(config['topk_method'])}")
        if count in (None, 1) or config["topk_method"] != method[1] or count == chosen:
            return dict.fromkeys(names)
        stated = f"`n_group` = {shown(count)} and `topk_group` = {shown(chosen)}"
        if any(type(each) is not int or each < 1 for each in (count, chosen, topk)) or chosen > count:
            raise Refused(f"{stated} are no groups of experts")
        if topk // chosen != best:
            raise Refused(
                f"{stated} with `num_experts_per_tok` = {topk}: Megatron Core rates a group by its best "
                f"{topk // chosen} experts, and this class by its best {best}"
            )
        return dict(zip(names, (count, chosen), strict=True))

    def to_hf(args: Values) -> dict[str, Any]:
        count, chosen, topk = (args.get(name) for name in (*names, "moe_router_topk"))
        if not count or not chosen or count == chosen or topk == chosen:
            return {"n_group": 1, "topk_group": 1, "topk_method": method[0]}
        if topk // chosen != best:
            raise Refused(
                f"`moe_router_num_groups` = {count} and `moe_router_group_topk` = {chosen} with `moe_router_topk` = "
                f"{topk} rate a group by its best {topk // chosen} experts, and the family by its best {best}"
            )
        return {"n_group": count, "topk_group": chosen, "topk_method": method[1]}

    own = {**dict(zip(keys, default, strict=True)), "topk_method": method[0]}
    return Field(own, names, to_megatron, to_hf)


def sigmoid_router(*, default: int) -> Field:
    """Return the field of a router with a sigmoid score per expert, and a bias used for the selection only.

    The weights of several selected experts are normalised, in Megatron Core always.
    """
    count = same("num_experts_per_tok", "moe_router_topk", default=default)
    fixed = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}

    def to_megatron(config: Values) -> dict[str, Any]:
        args = count.to_megatron(config)
        if config["norm_topk_prob"] is not (args["moe_router_topk"] > 1):
            stated = f"`norm_topk_prob` = {shown(config['norm_topk_prob'])}"
            raise Refused(
                f"{stated} with `num_experts_per_tok` = {args['moe_router_topk']}, which Megatron Core has not"
            )
        return {**args, **fixed, "moe_router_pre_softmax": False}

    def to_hf(args: Values) -> dict[str, Any]:
        wrong = [name for name in fixed if args.get(name) != fixed[name]]
        if wrong:
            raise Refused(*(f"`{name}` = {args.get(name)!r}, the family has {fixed[name]!r}" for name in wrong))
        topk = count.to_hf(args)
        return {**topk, "norm_topk_prob": topk["num_experts_per_tok"] > 1}

    keys = {**count.hf, "norm_topk_prob": True}
    return Field(keys, (*count.megatron, *fixed, "moe_router_pre_softmax"), to_megatron, to_hf)


def shared_expert(*, default: int) -> Field:
    """Return the field of the size of the shared expert, which has a gate of its own."""
    size = same("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", default=default)

    def to_megatron(config: Values) -> dict[str, Any]:
        return {**size.to_megatron(config), "moe_shared_expert_gate": True}

    def to_hf(args: Values) -> dict[str, Any]:
        if not args.get("moe_shared_expert_gate"):
            raise Refused("`moe_shared_expert_gate` = False, the family has True")
        return size.to_hf(args)

    return Field(size.hf, (*size.megatron, "moe_shared_expert_gate"), to_megatron, to_hf)
