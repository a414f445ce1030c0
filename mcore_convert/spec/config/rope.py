"""Rotary positions: the three spellings in `config.json`, and Megatron's arguments.

transformers up to 4 writes `rope_theta` and `rope_scaling`, transformers 5 a single `rope_parameters`. Megatron has
`rotary_base`, llama3's scaling with three built-in constants, and linear interpolation of positions
(`rotary_pos_embedding.py`, the same in Megatron Core 0.12 to main).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mcore_convert.spec import releases
from mcore_convert.spec.config.fields import stated
from mcore_convert.spec.config.mapping import Field, Refused, Values, shown

THETA = 10000.0  # the class default of transformers
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# pretrain_gpt.py and gpt_builders.py pass only `rope_scaling` to GPTModel, which then uses its own default factor.
SCRIPTS_ROPE_SCALING_FACTOR = 8.0
DICTS = ("rope_parameters", "rope_scaling")


def remarks(args: Values) -> list[str]:
    """Return one line for each scaling that a run of Megatron-LM stored but its training script may not have used."""
    release = releases.of_run(args)
    if release is None or args.get("position_embedding_type") != "rope" or args.get("multi_latent_attention"):
        return []
    unused = {
        "rope_scaling_factor": (bool(args.get("use_rope_scaling")), SCRIPTS_ROPE_SCALING_FACTOR),
        "rotary_seq_len_interpolation_factor": (release < releases.INTERPOLATION, 1),
    }
    return [
        f"`{name}` = {args[name]} is what config.json says: `pretrain_gpt.py` of Megatron-LM does not hand it on, "
        f"and a run by that script was scaled by {scripts}"
        for name, (is_unused, scripts) in unused.items()
        if is_unused and args.get(name) not in (None, scripts)
    ]


def rope(
    *,
    theta: float = THETA,
    percent: float | None = None,
    keys: tuple[str, str] = ("rope_theta", "partial_rotary_factor"),
    kinds: tuple[str, ...] = ("default", "linear", "llama3"),
    inert: tuple[str, ...] = (),
) -> Field:
    """Return the field of all keys for rotary positions. It writes the flat spelling,
    which all versions read.

    Args:
        theta: the class's default base.
        percent: the share of a head that the class rotates by default; None if it always rotates the whole head.
        keys: the flat names of the base and of the share.
        kinds: the `rope_type`s that both the class and Megatron support.
        inert: keys of the dictionaries without effect.
    """
    return Rope(theta, percent, keys, kinds, inert=inert).field()


@dataclass(frozen=True)
class Rope:
    """Rotary positions of one class of transformers: its defaults, its names and its kinds of scaling."""

    theta: float
    percent: float | None
    keys: tuple[str, str]
    kinds: tuple[str, ...]
    inert: tuple[str, ...] = field(default=(), kw_only=True)

    def field(self) -> Field:
        flat = self.keys if self.percent is not None else self.keys[:1]
        return Field(dict.fromkeys((*flat, *reversed(DICTS))), self.arguments(), self.to_megatron, self.to_hf)

    def arguments(self) -> tuple[str, ...]:
        names = ("rotary_base", "use_rope_scaling", "rope_scaling_factor", "rotary_seq_len_interpolation_factor")
        return names if self.percent is None else (*names, "rotary_percent")

    def to_megatron(self, config: Values) -> dict[str, Any]:
        wrong = [f"`{name}` = {shown(config[name])}" for name in DICTS if not isinstance(config[name], dict | None)]
        if wrong:
            raise Refused(*wrong)
        scalings = {name: dict(config[name]) for name in DICTS if config[name]}
        args: dict[str, Any] = {"rotary_base": self._base(config, scalings)}
        if self.percent is not None:
            args |= {"rotary_percent": self._share(config, scalings)}
        return {**args, **self._scaling(config, scalings)}

    def _base(self, config: Values, scalings: dict[str, dict[str, Any]]) -> int:
        name, theta = _one_of(config, self.keys[0], scalings, "rope_theta", self.theta)
        if isinstance(theta, bool) or not isinstance(theta, int | float) or theta != int(theta) or theta < 1:
            raise Refused(f"`{name}` = {shown(theta)}, Megatron's `rotary_base` is a positive integer")
        return int(theta)

    def _share(self, config: Values, scalings: dict[str, dict[str, Any]]) -> float:
        name, share = _one_of(config, self.keys[1], scalings, "partial_rotary_factor", self.percent)
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise Refused(f"`{name}` = {shown(share)} is not a share of a head")
        return float(share)

    def _scaling(self, config: Values, scalings: dict[str, dict[str, Any]]) -> dict[str, Any]:
        meanings = []
        for name, scaling in scalings.items():
            kinds = {str(scaling.pop(key)) for key in ("rope_type", "type") if scaling.get(key) is not None}
            if len(kinds) > 1:
                raise Refused(f"`{name}.rope_type` and `{name}.type` differ: {' and '.join(sorted(kinds))}")
            kind = next(iter(kinds), "default")
            if kind not in self.kinds:
                raise Refused(f"`{name}.rope_type` = {kind}")
            if scaling.pop("partial_rotary_factor", 1.0) not in (1.0, None):
                raise Refused(f"`{name}.partial_rotary_factor` = {shown(config[name]['partial_rotary_factor'])}")
            for key in self.inert:
                scaling.pop(key, None)
            meanings.append(self.read(kind, name, scaling, config))
            if scaling:
                raise Refused(*(f"`{name}.{key}` = {shown(value)} is not known" for key, value in scaling.items()))
        if len(meanings) > 1 and meanings[0] != meanings[1]:
            raise Refused("`rope_parameters` and `rope_scaling` differ")
        return meanings[0] if meanings else self.read("default", "", {}, config)

    def read(self, kind: str, name: str, scaling: dict[str, Any], config: Values) -> dict[str, Any]:
        """Return the arguments of one kind of scaling, from the dictionary called `name`;
        pop the entries that are read.
        """
        return _SCALINGS[kind](name, scaling, config)

    def kind_of(self, args: Values) -> tuple[str, dict[str, Any] | None]:
        """Return the scaling in the arguments: the `rope_type`, and its dictionary in `config.json`."""
        return _kind_of(args)

    def to_hf(self, args: Values) -> dict[str, Any]:
        kind, scaling = self.kind_of(args)
        if kind not in self.kinds:
            raise Refused(f"positions scaled as `{kind}`, which the family has not")
        config: dict[str, Any] = {self.keys[0]: float(stated(args, "rotary_base"))}
        if self.percent is not None:
            config[self.keys[1]] = float(stated(args, "rotary_percent"))
        return {**config, "rope_scaling": scaling}


def _one_of(
    config: Values, flat: str, scalings: dict[str, dict[str, Any]], key: str, default: float | None
) -> tuple[str, Any]:
    """Return the name and the value of a key that may be flat and in each dictionary, which must agree;
    pop it from the dictionaries.
    """
    values = {f"{name}.{key}": scaling.pop(key) for name, scaling in scalings.items() if scaling.get(key) is not None}
    if config[flat] is not None:
        values[flat] = config[flat]
    if len(set(values.values())) > 1:
        raise Refused(" and ".join(f"`{name}` = {shown(value)}" for name, value in values.items()) + " differ")
    return next(iter(values.items()), (flat, default))


def _none(*_: Any) -> dict[str, Any]:
    return {"use_rope_scaling": False, "rotary_seq_len_interpolation_factor": None}


def _linear(name: str, scaling: dict[str, Any], _: Values) -> dict[str, Any]:
    """Return the arguments of linear scaling, which divides positions (Megatron) or frequencies (transformers)."""
    factor = number_from_one(name, "factor", scaling)
    if factor != int(factor):
        raise Refused(f"`{name}.factor` = {shown(factor)}, only an integer can be Megatron's interpolation factor")
    return {"use_rope_scaling": False, "rotary_seq_len_interpolation_factor": int(factor)}


def _llama3(name: str, scaling: dict[str, Any], config: Values) -> dict[str, Any]:
    factor = number_from_one(name, "factor", scaling)
    scaling.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
    wrong = []
    for key, value in LLAMA3.items():
        if (stated := scaling.pop(key, None)) != value:
            wrong.append(f"`{name}.{key}` = {shown(stated)}, Megatron has {shown(value)} built in")
    if wrong:
        raise Refused(*wrong)
    return {"use_rope_scaling": True, "rope_scaling_factor": factor, "rotary_seq_len_interpolation_factor": None}


_SCALINGS = {"default": _none, "linear": _linear, "llama3": _llama3}


def number_from_one(name: str, key: str, scaling: dict[str, Any]) -> float:
    """Pop a number from a dictionary.

    Raises:
        Refused: it is not a number, or below 1.
    """
    value = scaling.pop(key, None)
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 1:
        raise Refused(f"`{name}.{key}` = {shown(value)} is not a number from 1")
    return float(value)


def _kind_of(args: Values) -> tuple[str, dict[str, Any] | None]:
    """Return the scaling in the arguments: the `rope_type`, and its dictionary in `config.json`."""
    linear = args.get("rotary_seq_len_interpolation_factor")
    if args.get("use_rope_scaling"):
        if linear not in (None, 1):
            raise Refused(f"`rotary_seq_len_interpolation_factor` = {linear} beside `use_rope_scaling`")
        factor = float(stated(args, "rope_scaling_factor"))
        return "llama3", {"rope_type": "llama3", "factor": factor, **LLAMA3}
    if linear not in (None, 1):  # transformers before 4.43 reads `type`
        return "linear", {"rope_type": "linear", "type": "linear", "factor": float(linear)}
    return "default", None
