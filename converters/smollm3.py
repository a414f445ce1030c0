"""SmolLM3: Llama with layers without rotary positions, usually every fourth."""

from typing import Any

from converters import llama
from mcore_convert.spec import ConfigMapping, Family, vary
from mcore_convert.spec.config.fields import constant, inert, only, optional_window, stated
from mcore_convert.spec.config.mapping import Field, Refused, Values, shown
from mcore_convert.spec.config.rope import rope


def rotated_layers() -> Field:
    """Return the field of layers with rotary positions: 1 in `no_rope_layers`, and 0 in Megatron's `no_rope_freq`."""

    def to_megatron(config: Values) -> dict[str, Any]:
        count, every = config["num_hidden_layers"], config["no_rope_layer_interval"]
        rotated = config["no_rope_layers"] or [int((layer + 1) % every != 0) for layer in range(count)]
        if len(rotated) < count or set(rotated) - {0, 1}:
            raise Refused(f"`no_rope_layers` = {shown(rotated)} is not a 0 or 1 for each of {count} layers")
        still = [1 - each for each in rotated[:count]]
        return {"no_rope_freq": still if any(still) else None}

    def to_hf(args: Values) -> dict[str, Any]:
        count, still = stated(args, "num_layers"), args.get("no_rope_freq") or [0] * args["num_layers"]
        if isinstance(still, int):  # Megatron-LM's other spelling: every n-th layer
            still = [int((layer + 1) % still == 0) for layer in range(count)]
        if len(still) != count:
            raise Refused(f"`no_rope_freq` = {still} is not for {count} layers")
        return {"no_rope_layers": [1 - each for each in still]}

    return Field({"no_rope_layers": None, "no_rope_layer_interval": 4}, ("no_rope_freq",), to_megatron, to_hf)


CONFIG = ConfigMapping(
    "smollm3",
    ("SmolLM3ForCausalLM",),
    vary.fields(
        llama.SHARED,
        rope(theta=2000000.0),
        rotated_layers(),
        optional_window(default=None),
        constant(add_qkv_bias=False),
        only("attention_bias", False),
        only("mlp_bias", False),
        inert(pretraining_tp=1),
        vocab_size=128256,
        hidden_size=2048,
        num_hidden_layers=36,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
    ),
)
FAMILY = Family("smollm3", ("SmolLM3ForCausalLM",), CONFIG, llama.WITHOUT_BIAS, prevalence=40)
