"""Fields of latent attention: its ranks and sizes, and its rotary positions, which have scalings of their own.

Facts are from Megatron Core 0.12 to 0.19 (`multi_latent_attention.py`, `yarn_rotary_pos_embedding.py`,
`MLATransformerConfig`) and transformers 5.23 (`modeling_deepseek_v3.py`, `modeling_rope_utils.py`). Both rotate
neighbouring channels, so no matrix is permuted.
"""

from __future__ import annotations

from typing import Any

from mcore_convert.spec.config.arguments import LATENT_DEFAULTS, scales_by_all_positions
from mcore_convert.spec.config.fields import constant, inert, only, same, stated
from mcore_convert.spec.config.mapping import Field, Refused, Values, shown
from mcore_convert.spec.config.rope import Rope, number_from_one

# Arguments without a flag in Megatron-LM's command line, with the defaults of `MLATransformerConfig`.
WITHOUT_FLAG = {name: LATENT_DEFAULTS[name] for name in ("original_max_position_embeddings", "beta_fast", "beta_slow")}


EPSILON = 1e-6  # of the norms within latent attention in transformers, regardless of `rms_norm_eps`


def remarks(args: Values) -> list[str]:
    """Return one line for each difference between Megatron and Hugging Face; usually none."""
    epsilon = args.get("layernorm_epsilon")
    if not args.get("multi_latent_attention") or epsilon == EPSILON:
        return []
    return [
        f"norms within latent attention have an epsilon of {EPSILON} in transformers, and in Megatron Core that of all "
        f"others, {epsilon}: logits differ by as much"
    ]


def has_original_positions(args: Values) -> bool:
    """Return whether latent attention's YaRN has values that releases up to 0.13 have no arguments for
    (`arguments.scales_by_all_positions`).
    """
    if not args.get("multi_latent_attention") or args["rope_type"] != "yarn" or args["rotary_scaling_factor"] == 1:
        return False
    is_own = args["original_max_position_embeddings"] != args.get("max_position_embeddings")
    return bool(is_own or args["mscale"] != args["mscale_all_dim"])


def latent_attention(*, queries: int | None = 1536) -> tuple[Field, ...]:
    """Return the fields of the sizes of latent attention. Queries have no low-rank projection if their rank is `null`.

    Args:
        queries: their rank if `config.json` does not have it.
    """
    return (
        _rank_of_queries(queries),
        same("kv_lora_rank", "kv_lora_rank", default=512),
        same("qk_nope_head_dim", "qk_head_dim", default=128),
        same("qk_rope_head_dim", "qk_pos_emb_head_dim", default=64),
        same("v_head_dim", "v_head_dim", default=128),
        _heads(),
        only("attention_bias", False),
        inert(head_dim=None, qk_head_dim=None),  # transformers computes them from the others
        constant(multi_latent_attention=True, qk_layernorm=True, add_qkv_bias=False, rotary_interleaved=False),
    )


def _rank_of_queries(default: int | None) -> Field:
    def to_megatron(config: Values) -> dict[str, Any]:
        rank = config["q_lora_rank"]
        if rank is not None and (type(rank) is not int or rank < 1):
            raise Refused(f"`q_lora_rank` = {shown(rank)} is neither a rank nor null")
        return {"q_lora_rank": rank}

    return Field(
        {"q_lora_rank": default}, ("q_lora_rank",), to_megatron, lambda args: {"q_lora_rank": args.get("q_lora_rank")}
    )


def _heads() -> Field:
    """Return the field of as many key and value heads as query heads; no other argument has their sizes."""

    def to_megatron(config: Values) -> dict[str, Any]:
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        if kv_heads not in (None, heads):
            raise Refused(f"`num_key_value_heads` = {shown(kv_heads)}, latent attention has one for each of {heads}")
        return {"num_query_groups": heads, "group_query_attention": False}

    def to_hf(args: Values) -> dict[str, Any]:
        return {"num_key_value_heads": stated(args, "num_attention_heads")}

    names = ("num_query_groups", "group_query_attention", "kv_channels")
    return Field({"num_key_value_heads": None}, names, to_megatron, to_hf)


def latent_rope() -> Field:
    """Return the field of rotary positions for a part of each head, plain or scaled by YaRN."""
    return _LatentRope(10000.0, None, ("rope_theta", "partial_rotary_factor"), ("default", "yarn")).field()


class _LatentRope(Rope):
    """YaRN for latent attention: Megatron Core multiplies its factors into attention scores as transformers does."""

    def arguments(self) -> tuple[str, ...]:
        names = ("rotary_base", "rotary_percent", "use_rope_scaling", "rotary_seq_len_interpolation_factor")
        return (*names, "rope_type", "rotary_scaling_factor", "mscale", "mscale_all_dim", *WITHOUT_FLAG)

    def read(self, kind: str, name: str, scaling: dict[str, Any], config: Values) -> dict[str, Any]:
        if kind == "default":
            return {"rope_type": "rope", "rotary_scaling_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}
        if scaling.pop("attention_factor", None) is not None:
            raise Refused(f"`{name}.attention_factor`, which Megatron Core makes of `mscale` and `mscale_all_dim`")
        if scaling.pop("truncate", True) is not True:
            raise Refused(f"`{name}.truncate` = false, Megatron Core rounds the bounds of the ramp")
        args: dict[str, Any] = {"rope_type": "yarn", "rotary_scaling_factor": number_from_one(name, "factor", scaling)}
        positions = number_from_one(name, "original_max_position_embeddings", scaling)
        args["original_max_position_embeddings"] = int(positions)
        for key in ("beta_fast", "beta_slow"):
            args[key] = float(scaling.pop(key, None) or WITHOUT_FLAG[key])
        return {**args, **mscales(name, scaling)}

    def kind_of(self, args: Values) -> tuple[str, dict[str, Any] | None]:
        if args.get("use_rope_scaling"):
            raise Refused("`use_rope_scaling`, which latent attention does not heed")
        if args.get("rotary_percent") not in (None, 1.0):
            raise Refused(f"`rotary_percent` = {args['rotary_percent']}, all of the rotary part of a head is rotated")
        factor = float(stated(args, "rotary_scaling_factor"))
        if factor < 1:
            raise Refused(f"`rotary_scaling_factor` = {factor} is below 1")
        if factor == 1:  # no scaling, of either kind
            return "default", None
        if stated(args, "rope_type") == "rope":
            if stated(args, "mscale_all_dim"):
                raise Refused(f"`rotary_scaling_factor` = {factor} beside `rope_type` = 'rope' scales attention alone")
            return "default", None
        if scales_by_all_positions(args) and args["mscale"] != args["mscale_all_dim"]:
            raise Refused(
                f"`mscale` = {args['mscale']} beside `mscale_all_dim` = {args['mscale_all_dim']}: Megatron Core up to "
                "0.13 scales scores of attention by the first, and transformers by the second"
            )
        scaling = {"factor": factor, **{name: stated(args, name) for name in WITHOUT_FLAG}, **written_mscales(args)}
        return "yarn", {"rope_type": "yarn", "type": "yarn", **scaling}


def mscales(name: str, scaling: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of YaRN's factors, popped from the dictionary called `name`."""
    own, all_dim = (float(scaling.pop(key, None) or 0.0) for key in ("mscale", "mscale_all_dim"))
    if not all_dim and own in (0.0, 1.0):
        return {"mscale": 1.0, "mscale_all_dim": 0.0}
    if not all_dim or not own:
        raise Refused(f"`{name}.mscale` = {own} beside `{name}.mscale_all_dim` = {all_dim}: only both, or neither")
    return {"mscale": own, "mscale_all_dim": all_dim}


def written_mscales(args: Values) -> dict[str, float]:
    """Return the entries of `config.json` for these factors; none if they are the defaults."""
    own, all_dim = (float(stated(args, name)) for name in ("mscale", "mscale_all_dim"))
    if (all_dim and not own) or (not all_dim and own != 1):
        raise Refused(f"`mscale` = {own} beside `mscale_all_dim` = {all_dim}: only both, or the first of 1")
    return {"mscale": own, "mscale_all_dim": all_dim} if all_dim else {}


def predicted_tokens() -> Field:
    """Return the field of the number of layers that predict further tokens,
    under the name of the published files or that of transformers.
    """

    def to_megatron(config: Values) -> dict[str, Any]:
        stated = {key: config[key] for key in ("num_nextn_predict_layers", "num_mtp_layers") if config[key] is not None}
        if len(set(map(repr, stated.values()))) > 1:
            raise Refused(" and ".join(f"`{key}` = {shown(value)}" for key, value in stated.items()) + " differ")
        key, count = next(iter(stated.items()), ("num_nextn_predict_layers", 1))
        if type(count) is not int or count < 0:
            raise Refused(f"`{key}` = {shown(count)} is not a number of layers")
        if count and config.get("tie_word_embeddings"):
            raise Refused(f"`{key}` = {count} beside `tie_word_embeddings` = true")
        return {"mtp_num_layers": count or None}

    def to_hf(args: Values) -> dict[str, Any]:
        return {"num_nextn_predict_layers": args.get("mtp_num_layers") or 0}

    keys = {"num_nextn_predict_layers": None, "num_mtp_layers": None}
    return Field(keys, ("mtp_num_layers",), to_megatron, to_hf, none_says=True)
