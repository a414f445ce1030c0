"""Fields of hybrids: the pattern of their layers, the sizes of Mamba mixers, experts in some layers.

Facts are from `NemotronHConfig` of transformers 5.23, from the code and the configurations that are published with
Nemotron-H, Nemotron Nano 2 and Nemotron 3 Nano, and from Megatron-LM 0.12 to 0.19 (`mamba_mixer.py`, `arguments.py`).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from mcore_convert.errors import ConfigError
from mcore_convert.spec import hybrid
from mcore_convert.spec.config.fields import inert, only, same, stated
from mcore_convert.spec.config.mapping import Field, Refused, Values, shown

# Names of layers in `layers_block_type`, in transformers 5 and before -> letters of the pattern.
BLOCKS = {
    "linear_attention": hybrid.MAMBA,
    "mamba": hybrid.MAMBA,
    "full_attention": hybrid.ATTENTION,
    "attention": hybrid.ATTENTION,
    "mlp": hybrid.MLP,
    "moe": hybrid.EXPERTS,
}
LISTS = ("layers_block_type", "layer_types")  # synonyms in transformers
DEFAULT = "ME*-"  # of the class in transformers
STEP, LEAST_STEP = "time_step_min", 0.001


def remarks(args: Values) -> list[str]:
    """Return one line for each difference between Megatron and Hugging Face; usually none."""
    if not hybrid.is_hybrid(args):
        return []
    return [
        f"transformers 5 raises time steps of Mamba layers to `{STEP}`, as neither Megatron Core nor the code that "
        "was published with such models does: logits differ where a step is smaller"
    ]


def letters_of(config: Values) -> str:
    """Return one letter per layer, from the pattern, the list of names, or both.

    Raises:
        Refused: they differ, or one is invalid.
    """
    stated = {}
    pattern = config["hybrid_override_pattern"]
    if pattern is not None:
        if not isinstance(pattern, str) or not pattern or set(pattern) - {*hybrid.LETTERS}:
            raise Refused(f"`hybrid_override_pattern` = {shown(pattern)} does not name layers by M, *, - and E")
        stated["hybrid_override_pattern"] = pattern
    for key in LISTS:
        names = config[key]
        if names is None:
            continue
        if not isinstance(names, list) or not names or set(names) - BLOCKS.keys():
            raise Refused(f"`{key}` = {shown(names)} does not name the layers of a hybrid")
        stated[key] = "".join(BLOCKS[name] for name in names)
    if not stated:
        stated["hybrid_override_pattern"] = DEFAULT
    if len(set(stated.values())) > 1:
        raise Refused(" and ".join(f"`{key}` = {shown(config[key])}" for key in stated) + " differ")
    letters = next(iter(stated.values()))
    count = config["num_hidden_layers"]
    if count is not None and (type(count) is not int or count != len(letters)):
        raise Refused(f"`num_hidden_layers` = {shown(count)}, and `{next(iter(stated))}` has {len(letters)} layers")
    return letters


def layer_pattern() -> Field:
    """Return the field of the kind of each layer, which also marks the model as a hybrid."""

    def to_megatron(config: Values) -> dict[str, Any]:
        letters = letters_of(config)
        return {
            "num_layers": len(letters),
            hybrid.PATTERN: letters,
            "is_hybrid_model": True,
            "spec": list(hybrid.SPECS[0]),
        }

    def to_hf(args: Values) -> dict[str, Any]:
        count, spec = stated(args, "num_layers"), args.get("spec")
        try:
            letters = hybrid.letters_of(args, count)
        except ConfigError as error:
            raise Refused(error.message) from error
        if letters is None:
            raise Refused("the layers are those of a `GPTModel`, and the family is a hybrid")
        if hybrid.PREDICTING in str(args.get(hybrid.PATTERN)):
            raise Refused(f"`{hybrid.PATTERN}` = {args[hybrid.PATTERN]!r} has layers that predict further tokens")
        if spec is not None and (not isinstance(spec, list | tuple) or list(spec) not in hybrid.SPECS):
            raise Refused(f"`spec` = {spec!r}, which may build other layers than `{' '.join(hybrid.SPECS[0])}`")
        return {"num_hidden_layers": count, "hybrid_override_pattern": letters}

    keys = dict.fromkeys(("hybrid_override_pattern", *LISTS, "num_hidden_layers"))
    names = ("num_layers", hybrid.PATTERN, hybrid.OLD_PATTERN, *hybrid.RATIOS, "is_hybrid_model", "spec")
    return Field(keys, names, to_megatron, to_hf)


def mixer() -> tuple[Field, ...]:
    """Return the fields of a Mamba mixer: its sizes, and the fixed properties of Megatron Core's mixer."""
    return (
        same("ssm_state_size", "mamba_state_dim", default=128),
        same("mamba_head_dim", "mamba_head_dim", default=64),
        same("n_groups", "mamba_num_groups", default=8),
        same("mamba_num_heads", "mamba_num_heads", default=128),
        only("conv_kernel", hybrid.KERNEL),
        only("use_conv_bias", True),
        only("use_bias", False),
        only("mamba_proj_bias", False),
        only("mamba_hidden_act", "silu"),
        only("residual_in_fp32", False),
        _step_limit(),
        _least_step(),
        inert(time_step_max=0.1, time_step_floor=1e-4, time_step_rank=None),  # for initialisation
        inert(expand=2, rescale_prenorm_residual=True),  # ignored if the number of heads is given; for initialisation
        inert(chunk_size=128, mamba_ssm_cache_dtype="float32", use_mamba_kernels=True, num_logits_to_keep=1),
    )


def epsilon() -> Field:
    """Return the field of the epsilon of all norms; Megatron Core has a fixed one in a mixer."""
    field = same("layer_norm_epsilon", "layernorm_epsilon", kind=float, default=hybrid.EPSILON)

    def checked(values: Values, name: str, result: dict[str, Any]) -> dict[str, Any]:
        if values[name] != hybrid.EPSILON:
            stated = (
                f"`{name}` = {values[name]}, and the norm within a Mamba layer has {hybrid.EPSILON} in Megatron Core"
            )
            raise Refused(stated)
        return result

    return replace(
        field,
        to_megatron=lambda config: checked(config, "layer_norm_epsilon", field.to_megatron(config)),
        to_hf=lambda args: checked(args, "layernorm_epsilon", field.to_hf(args)),
    )


def _step_limit() -> Field:
    """Return the field of the bounds of time steps: Megatron Core has none. Infinity has two spellings."""

    def to_megatron(config: Values) -> dict[str, Any]:
        value = config["time_step_limit"]
        low, high = value if isinstance(value, list) and len(value) == 2 else (None, None)
        if low != 0 or high not in (math.inf, {"__float__": "Infinity"}):
            raise Refused(f"`time_step_limit` = {shown(value)}, only [0.0, Infinity] can be represented")
        return {}

    return Field({"time_step_limit": [0.0, math.inf]}, (), to_megatron, lambda _: {})


def _least_step() -> Field:
    """Return the field of the least time step, used by transformers 5 and for initialisation: at most the default."""

    def to_megatron(config: Values) -> dict[str, Any]:
        if not 0 <= config[STEP] <= LEAST_STEP:
            stated = f"`{STEP}` = {shown(config[STEP])}"
            raise Refused(f"{stated}, only up to {LEAST_STEP}: Megatron Core raises no time step")
        return {}

    return Field({STEP: LEAST_STEP}, (), to_megatron, lambda _: {})


def where_experts_are(*fields: Field) -> tuple[Field, ...]:
    """Return the fields, without effect for models in which no layer has experts:
    their keys then have the defaults of the class.
    """

    def in_config(config: Values) -> bool:
        try:
            return hybrid.EXPERTS in letters_of(config)
        except Refused:  # reported by the field of the layers
            return False

    def in_arguments(args: Values) -> bool:
        return hybrid.EXPERTS in str(args.get(hybrid.PATTERN))

    def limited(field: Field) -> Field:
        return replace(
            field,
            to_megatron=lambda config: field.to_megatron(config) if in_config(config) else {},
            to_hf=lambda args: field.to_hf(args) if in_arguments(args) else {},
        )

    return tuple(map(limited, fields))


def size_of_head(*, default: int) -> Field:
    """Return the field of the size of an attention head; the first of these models have another name for it."""
    field = same("head_dim", "kv_channels", default=default)

    def to_megatron(config: Values) -> dict[str, Any]:
        stated = {key: config[key] for key in ("head_dim", "attention_head_dim") if config[key] is not None}
        if len(set(map(repr, stated.values()))) > 1:
            raise Refused(" and ".join(f"`{key}` = {shown(value)}" for key, value in stated.items()) + " differ")
        return field.to_megatron({"head_dim": next(iter(stated.values()), default)})

    return Field({"head_dim": None, "attention_head_dim": None}, field.megatron, to_megatron, field.to_hf)


def no_predicted_tokens() -> Field:
    """Return the field of layers that predict further tokens, which the class in transformers does not read."""

    def to_megatron(config: Values) -> dict[str, Any]:
        if config["num_nextn_predict_layers"]:
            stated = f"`num_nextn_predict_layers` = {shown(config['num_nextn_predict_layers'])}"
            raise Refused(
                f"{stated}: layers of a hybrid that predict further tokens, which transformers does not compute"
            )
        return {}

    keys = {"num_nextn_predict_layers": 0, "mtp_hybrid_override_pattern": None, "mtp_layers_block_type": None}
    return Field(keys, (), to_megatron, lambda _: {})
