"""Fields of models whose layers mix plain attention and linear attention by the gated delta rule.

Names and meanings are those of Megatron-LM 0.16.1 to 0.19 (`transformer_config.py`,
`experimental_attention_variant_module_specs.py`).
"""

from __future__ import annotations

from typing import Any

from mcore_convert.spec.config.fields import constant, same, stated
from mcore_convert.spec.config.mapping import Field, Refused, Values, shown
from mcore_convert.spec.config.neutral import FULL_ATTENTION
from mcore_convert.spec.layers import GATED_DELTA_NET, linear_layers

LINEAR_ATTENTION = "linear_attention"
INTERVAL = 4  # the class default

# Defaults of Megatron-LM and of the classes in transformers.
SIZES = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
NO_LINEAR_ATTENTION = {"experimental_attention_variant": None, "linear_attention_freq": None, **SIZES}


def gated_delta_net() -> tuple[Field, ...]:
    """Return the fields of linear attention: its layers, its sizes, and the gate of the other layers."""
    return (
        constant(
            experimental_attention_variant=GATED_DELTA_NET,
            attention_output_gate=True,
            qk_layernorm=True,
            layernorm_zero_centered_gamma=True,
        ),
        _layers(),
        *(same(name, name, default=size) for name, size in SIZES.items()),
    )


def pattern_of(config: Values) -> list[bool]:
    """Return which layers have linear attention: by `layer_types`, or all but every n-th.

    Raises:
        Refused: the value is invalid.
    """
    count, kinds, interval = config["num_hidden_layers"], config["layer_types"], config["full_attention_interval"]
    if kinds is None:
        if type(interval) is not int or interval < 1:
            raise Refused(f"`full_attention_interval` = {shown(interval)} is not a number of layers")
        return [(layer + 1) % interval != 0 for layer in range(count)]
    if not isinstance(kinds, list) or len(kinds) != count or not set(kinds) <= {LINEAR_ATTENTION, FULL_ATTENTION}:
        raise Refused(f"`layer_types` = {shown(kinds)} does not name the attention of {count} layers")
    return [kind == LINEAR_ATTENTION for kind in kinds]


def _layers() -> Field:
    def to_megatron(config: Values) -> dict[str, Any]:
        pattern = pattern_of(config)
        interval = next((at + 1 for at, is_linear in enumerate(pattern) if not is_linear), None)
        if interval is not None and pattern == [(layer + 1) % interval != 0 for layer in range(len(pattern))]:
            return {"linear_attention_freq": interval}
        return {"linear_attention_freq": [int(is_linear) for is_linear in pattern]}

    def to_hf(args: Values) -> dict[str, Any]:
        frequency = args.get("linear_attention_freq")
        pattern = linear_layers(args, stated(args, "num_layers"))
        kinds = [LINEAR_ATTENTION if is_linear else FULL_ATTENTION for is_linear in pattern]
        interval = {"full_attention_interval": frequency} if isinstance(frequency, int) else {}
        return {"layer_types": kinds, **interval}

    keys = {"layer_types": None, "full_attention_interval": INTERVAL}
    return Field(keys, ("linear_attention_freq",), to_megatron, to_hf)


def predicted_token(key: str) -> Field:
    """Return the field of a layer that predicts a further token; published files have it even without the key.

    There, such a layer has plain attention. If the decoder's last layer does not, or embeddings are tied, no model of
    Megatron Core is known to have such a layer.
    """

    def to_megatron(config: Values) -> dict[str, Any]:
        count = 1 if config[key] is None else config[key]
        if type(count) is not int or count not in (0, 1):
            raise Refused(f"`{key}` = {shown(count)}, only one layer that predicts tokens can be represented")
        return {"mtp_num_layers": 1 if count and fits(config) else None}

    def fits(config: Values) -> bool:
        try:
            return not config["tie_word_embeddings"] and not pattern_of(config)[-1]
        except Refused:  # reported by the field of the layers
            return False

    def to_hf(args: Values) -> dict[str, Any]:
        count = args.get("mtp_num_layers") or 0
        if count > 1:
            raise Refused(f"`mtp_num_layers` = {count}, the family has one")
        return {key: count}

    return Field({key: None}, ("mtp_num_layers",), to_megatron, to_hf, none_says=True)
