"""Rotary positions scaled by YaRN, for attention that is not latent.

Facts are from Megatron Core 0.15 to 0.19 (`gpt_model.py`, `yarn_rotary_pos_embedding.py`), Megatron-LM 0.19
(`argument_utils.py`, `_apply_yarn_config_from_args`), the first to have flags for them, and transformers 5.23
(`modeling_rope_utils.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mcore_convert.spec.config.arguments import YARN_DEFAULTS
from mcore_convert.spec.config.fields import stated
from mcore_convert.spec.config.latent import mscales, written_mscales
from mcore_convert.spec.config.mapping import Field, Refused, Values, shown
from mcore_convert.spec.config.rope import Rope, number_from_one

# Keys of the dictionary in `config.json` -> arguments.
PREFIXED = {
    "original_max_position_embeddings": "yarn_original_max_position_embeddings",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
    "truncate": "yarn_correction_range_round_to_int",
}
BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}  # of transformers
# Arguments of other scalings, which `YarnRotaryEmbedding` ignores, with their neutral values.
UNHEEDED = {
    "use_rope_scaling": (None, False),
    "rotary_seq_len_interpolation_factor": (1, None),
    "rotary_percent": (None, 1.0),
}


def yarn(*, theta: float, default: dict[str, Any]) -> Field:
    """Return the field of positions that are scaled by YaRN, or not scaled.

    Args:
        theta: the class's default base.
        default: the class's default scaling.
    """
    return _Yarn(theta, None, ("rope_theta", "partial_rotary_factor"), ("default", "yarn"), default).field()


@dataclass(frozen=True)
class _Yarn(Rope):
    """YaRN for whole heads; its factor multiplies sines and cosines."""

    default: Values

    def arguments(self) -> tuple[str, ...]:
        return ("rotary_base", "position_embedding_type", *UNHEEDED, *YARN_DEFAULTS)

    def to_megatron(self, config: Values) -> dict[str, Any]:
        says_nothing = config["rope_parameters"] is None and not config["rope_scaling"]  # an empty one is not heeded
        return super().to_megatron({**config, "rope_parameters": self.default} if says_nothing else config)

    def read(self, kind: str, name: str, scaling: dict[str, Any], config: Values) -> dict[str, Any]:
        plain: dict[str, Any] = {argument: neutral[-1] for argument, neutral in UNHEEDED.items()}
        if kind == "default":
            return {**plain, "position_embedding_type": "rope"}
        if scaling.pop("attention_factor", None) is not None:
            raise Refused(f"`{name}.attention_factor`, which Megatron Core makes of `mscale` and `mscale_all_dim`")
        truncate = scaling.pop("truncate", True)
        if not isinstance(truncate, bool):
            raise Refused(f"`{name}.truncate` = {shown(truncate)} is not a bool")
        args = {
            "position_embedding_type": "yarn",
            "rotary_scaling_factor": number_from_one(name, "factor", scaling),
            PREFIXED["original_max_position_embeddings"]: int(
                number_from_one(name, "original_max_position_embeddings", scaling)
            ),
            **{PREFIXED[key]: float(scaling.pop(key, None) or BETAS[key]) for key in BETAS},
            PREFIXED["truncate"]: truncate,
        }
        return {**plain, **args, **mscales(name, scaling)}

    def kind_of(self, args: Values) -> tuple[str, dict[str, Any] | None]:
        positions = stated(args, "position_embedding_type")
        beside = [name for name, neutral in UNHEEDED.items() if args.get(name) not in neutral]
        if beside:
            raise Refused(*(f"`{name}` = {args[name]!r} which the family has not" for name in beside))
        if positions == "rope":
            return "default", {"rope_type": "default"}
        if positions != "yarn":
            raise Refused(f"`position_embedding_type` = {positions!r}, the family has 'yarn' or 'rope'")
        factor = float(stated(args, "rotary_scaling_factor"))
        if factor < 1:
            raise Refused(f"`rotary_scaling_factor` = {factor} is below 1")
        own = {key: stated(args, name) for key, name in PREFIXED.items()}
        return "yarn", {"rope_type": "yarn", "factor": factor, **own, **written_mscales(args)}
