"""Mistral: Llama without biases, and with an attention window."""

from typing import Any

from converters import llama
from mcore_convert.spec import ConfigMapping, Family, vary
from mcore_convert.spec.config.fields import constant, sliding_window
from mcore_convert.spec.config.mapping import Field, Refused, Values, shown
from mcore_convert.spec.config.windows import FULL, SLIDING


def window() -> Field:
    """Return the field of a window of all layers, or of none.

    transformers takes a Mistral with `layer_types` for a Ministral, whose layers have the window only where these say
    so (5.23, `configuration_auto.py`).
    """
    usual = sliding_window(default=4096)

    def to_megatron(config: Values) -> dict[str, Any]:
        kinds = config["layer_types"]
        if kinds is None or kinds == [SLIDING] * config["num_hidden_layers"]:
            return usual.to_megatron(config)
        if kinds != [FULL] * config["num_hidden_layers"]:
            raise Refused(
                f"`layer_types` = {shown(kinds)}, only one kind of attention in all layers can be represented"
            )
        return usual.to_megatron({**config, "sliding_window": None})

    return Field({**usual.hf, "layer_types": None}, usual.megatron, to_megatron, usual.to_hf)


CONFIG = ConfigMapping(
    "mistral",
    ("MistralForCausalLM",),
    vary.fields(
        llama.SHARED,
        window(),
        constant(add_qkv_bias=False),
        intermediate_size=14336,
        num_key_value_heads=8,
        max_position_embeddings=131072,
    ),
)
FAMILY = Family("mistral", ("MistralForCausalLM",), CONFIG, llama.WITHOUT_BIAS, prevalence=80)
