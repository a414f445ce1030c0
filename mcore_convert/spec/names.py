"""Names with `{layer}`, `{mtp}` and `{expert}` placeholders: templates, which can be both formatted and matched."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

PLACEHOLDERS = ("layer", "mtp", "expert")


# States of a weight: the model's tensor, and the optimizer's tensors for it, each of the weight's shape.
PARAM, MASTER, EXP_AVG, EXP_AVG_SQ, MOMENTUM = "param", "master", "exp_avg", "exp_avg_sq", "momentum_buffer"
MOMENTS = (EXP_AVG, EXP_AVG_SQ, MOMENTUM)
OPTIMIZER_STATES = (MASTER, *MOMENTS)
ADAM, LION, BY_MOMENTUM = (EXP_AVG, EXP_AVG_SQ), (EXP_AVG,), (MOMENTUM,)  # BY_MOMENTUM: SGD and Muon


class Index(NamedTuple):
    """Index of a layer and of an expert; None for a weight outside the layers or without experts.

    Layers that predict further tokens are numbered by `mtp`, and their `layer` continues after those of the decoder:
    the first is `mtp.layers.0` in Megatron, and the layer after the decoder's last one in Hugging Face.
    """

    layer: int | None = None
    expert: int | None = None
    mtp: int | None = None

    @property
    def number(self) -> int | None:
        """Number of the layer in Megatron's names."""
        return self.layer if self.mtp is None else self.mtp


@lru_cache(maxsize=4096)
def placeholders_of(template: str) -> tuple[str, ...]:
    """Return the placeholders in a template, in the order of PLACEHOLDERS."""
    return tuple(name for name in PLACEHOLDERS if f"{{{name}}}" in template)


def spell(template: str, at: Index) -> str:
    """Return the key for an index: `spell("h.{layer}.ln", Index(3))` is `h.3.ln`."""
    if "{" not in template:  # for example if layers and experts are axes
        return template
    name = template.replace("{layer}", str(at.layer)).replace("{expert}", str(at.expert))
    return name if at.mtp is None else name.replace("{mtp}", str(at.mtp))


@lru_cache(maxsize=4096)
def drop(template: str, *names: str) -> str:
    """Return the template without placeholders that are axes of the tensor: `h.{layer}.ln` becomes `h.ln`."""
    for name in names:
        template = template.replace(f".{{{name}}}", "")
    return template


def match(template: str, key: str) -> Index | None:
    """Return the index for which a template gives `key`, or None if there is none."""
    matched = _compiled(template).fullmatch(key)
    if matched is None:
        return None
    return Index(**{name: int(value) for name, value in matched.groupdict().items()})


@lru_cache(maxsize=4096)
def _compiled(template: str) -> re.Pattern[str]:
    pattern = re.escape(template)
    for name in PLACEHOLDERS:  # no leading zeros: spell() never writes `h.03.`
        pattern = pattern.replace(rf"\{{{name}\}}", rf"(?P<{name}>0|[1-9]\d*)", 1)
    return re.compile(pattern)
