"""Rotary positions: the three spellings of `config.json` and the arguments of Megatron.

transformers up to 4 writes `rope_theta` beside `rope_scaling`, transformers 5 one `rope_parameters`. Megatron has
`rotary_base`, llama3's scaling with three constants built in, and linear interpolation of positions
(`rotary_pos_embedding.py`, the same in Megatron Core 0.12 to main).
"""

from __future__ import annotations

from typing import Any

from mcore_convert.spec.config import Field, Refused, Values, shown
from mcore_convert.spec.fields import stated

THETA = 10000.0  # the class default of transformers
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
DICTS = ("rope_parameters", "rope_scaling")


def rope() -> Field:
    """The field: `rope_theta`, `rope_scaling` and `rope_parameters`. Written in the flat spelling, which all read."""
    hf = {"rope_theta": None, "rope_scaling": None, "rope_parameters": None}
    args = ("rotary_base", "use_rope_scaling", "rope_scaling_factor", "rotary_seq_len_interpolation_factor")
    return Field(hf, args, _to_megatron, _to_hf)


def _to_megatron(config: Values) -> dict[str, Any]:
    wrong = [f"`{name}` = {shown(config[name])}" for name in DICTS if not isinstance(config[name], dict | None)]
    if wrong:
        raise Refused(*wrong)
    said = {name: dict(config[name]) for name in DICTS if config[name]}
    return {"rotary_base": _base(config, said), **_scaling(config, said)}


def _base(config: Values, said: dict[str, dict[str, Any]]) -> int:
    thetas = {}
    for name, scaling in said.items():
        if "rope_theta" in scaling:
            thetas[f"{name}.rope_theta"] = scaling.pop("rope_theta")
    if config["rope_theta"] is not None:
        thetas["rope_theta"] = config["rope_theta"]
    if len(set(thetas.values())) > 1:
        raise Refused(" and ".join(f"`{name}` = {shown(theta)}" for name, theta in thetas.items()) + " differ")
    name, theta = next(iter(thetas.items()), ("rope_theta", THETA))
    if isinstance(theta, bool) or not isinstance(theta, int | float) or theta != int(theta) or theta < 1:
        raise Refused(f"`{name}` = {shown(theta)}, Megatron's `rotary_base` is a positive integer")
    return int(theta)


def _scaling(config: Values, said: dict[str, dict[str, Any]]) -> dict[str, Any]:
    meanings = []
    for name, scaling in said.items():
        kinds = {str(scaling.pop(key)) for key in ("rope_type", "type") if scaling.get(key) is not None}
        if len(kinds) > 1:
            raise Refused(f"`{name}.rope_type` and `{name}.type` differ: {' and '.join(sorted(kinds))}")
        kind = next(iter(kinds), "default")
        if kind not in _SCALINGS:
            raise Refused(f"`{name}.rope_type` = {kind}")
        if scaling.pop("partial_rotary_factor", 1.0) not in (1.0, None):
            raise Refused(f"`{name}.partial_rotary_factor` = {shown(config[name]['partial_rotary_factor'])}")
        meanings.append(_SCALINGS[kind](name, scaling, config))
        if scaling:
            raise Refused(*(f"`{name}.{key}` = {shown(value)} is not known" for key, value in scaling.items()))
    if len(meanings) > 1 and meanings[0] != meanings[1]:
        raise Refused("`rope_parameters` and `rope_scaling` differ")
    return meanings[0] if meanings else _none()


def _none(*_: Any) -> dict[str, Any]:
    return {"use_rope_scaling": False, "rotary_seq_len_interpolation_factor": None}


def _linear(name: str, scaling: dict[str, Any], _: Values) -> dict[str, Any]:
    """Positions divided by the factor (Megatron) or frequencies divided by it (transformers): the same angles."""
    factor = _number(name, "factor", scaling)
    if factor != int(factor):
        raise Refused(f"`{name}.factor` = {shown(factor)}, only an integer can be Megatron's interpolation factor")
    return {"use_rope_scaling": False, "rotary_seq_len_interpolation_factor": int(factor)}


def _llama3(name: str, scaling: dict[str, Any], config: Values) -> dict[str, Any]:
    factor = _number(name, "factor", scaling)
    scaling.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
    wrong = []
    for key, value in LLAMA3.items():
        if (found := scaling.pop(key, None)) != value:
            wrong.append(f"`{name}.{key}` = {shown(found)}, Megatron has {shown(value)} built in")
    if wrong:
        raise Refused(*wrong)
    return {"use_rope_scaling": True, "rope_scaling_factor": factor, "rotary_seq_len_interpolation_factor": None}


_SCALINGS = {"default": _none, "linear": _linear, "llama3": _llama3}


def _number(name: str, key: str, scaling: dict[str, Any]) -> float:
    value = scaling.pop(key, None)
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 1:
        raise Refused(f"`{name}.{key}` = {shown(value)} is not a number from 1")
    return float(value)


def _to_hf(args: Values) -> dict[str, Any]:
    theta = float(stated(args, "rotary_base"))
    linear = args.get("rotary_seq_len_interpolation_factor")
    if args.get("use_rope_scaling"):
        if linear not in (None, 1):
            raise Refused(f"`rotary_seq_len_interpolation_factor` = {linear} beside `use_rope_scaling`")
        factor = float(stated(args, "rope_scaling_factor"))
        return {"rope_theta": theta, "rope_scaling": {"rope_type": "llama3", "factor": factor, **LLAMA3}}
    if linear not in (None, 1):  # `type` is what transformers before 4.43 reads
        return {"rope_theta": theta, "rope_scaling": {"rope_type": "linear", "type": "linear", "factor": float(linear)}}
    return {"rope_theta": theta, "rope_scaling": None}
