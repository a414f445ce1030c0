"""Attention windows in some of the layers.

Megatron Core has one window size; either every n-th layer has no window, or a list has a 1 for each layer with one
(0.15 to 0.19, `transformer/utils.py`, `is_layer_window_attention`, which counts layers from 1).
"""

from __future__ import annotations

from typing import Any

from mcore_convert.spec.config.fields import sliding_window, stated
from mcore_convert.spec.config.mapping import Field, Refused, Values, shown
from mcore_convert.spec.layers import plain_frequency

SLIDING, FULL = "sliding_attention", "full_attention"


def alternating_window(*, default: int) -> Field:
    """Return the field of a window in the layers that `layer_types` names; if absent, in every second layer from the
    first on.
    """
    window = sliding_window(default=default)

    def to_megatron(config: Values) -> dict[str, Any]:
        kinds, count = config["layer_types"], config["num_hidden_layers"]
        if kinds is None:
            kinds = [FULL if layer % 2 else SLIDING for layer in range(count)]
        if not isinstance(kinds, list) or len(kinds) != count or not set(kinds) <= {SLIDING, FULL}:
            raise Refused(f"`layer_types` = {shown(kinds)} is no list of `{SLIDING}` and `{FULL}` for {count} layers")
        if SLIDING in kinds and config["sliding_window"] is None:
            raise Refused(f"`sliding_window` = null beside layers of `{SLIDING}`")
        args = window.to_megatron(config)
        if args["window_size"] is None or SLIDING not in kinds:
            return {"window_size": None, "window_attn_skip_freq": None}
        return {**args, "window_attn_skip_freq": _frequency([int(kind == SLIDING) for kind in kinds])}

    def to_hf(args: Values) -> dict[str, Any]:
        own = window.to_hf(args)
        count = stated(args, "num_layers")
        pattern = _pattern(args.get("window_attn_skip_freq"), count) if own["sliding_window"] else [0] * count
        return {**own, "layer_types": [SLIDING if each else FULL for each in pattern]}

    keys = {**window.hf, "layer_types": None}
    return Field(keys, ("window_size", "window_attn_skip_freq"), to_megatron, to_hf, none_says=True)


def _frequency(pattern: list[int]) -> int | list[int] | None:
    """Return the layers with a window in Megatron's form: as a number if possible."""
    if all(pattern):
        return None
    numbers = range(2, len(pattern) + 1)
    return next((number for number in numbers if _pattern(number, len(pattern)) == pattern), pattern)


def _pattern(frequency: Any, count: int) -> list[int]:
    """Return a 1 for each layer with a window, and a 0 for each other one."""
    value = plain_frequency(frequency)
    if value is None:
        return [1] * count
    if type(value) is int and value > 0:
        return [int((layer + 1) % value != 0) for layer in range(count)]
    if isinstance(value, list) and len(value) == count and set(value) <= {0, 1}:
        return [int(each) for each in value]
    raise Refused(f"`window_attn_skip_freq` = {frequency!r} does not say which of {count} layers have a window")
