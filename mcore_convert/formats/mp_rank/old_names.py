"""Names of weights in Megatron-LM's model classes before Core, mapped to those of Core's local spec.

The classes existed from the first release (2020) to Core 0.17 (`--use-legacy-models`), with changing names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from mcore_convert.errors import MappingError, UnreadableCheckpoint, fold
from mcore_convert.storage.views import View

QKV = "self_attention.linear_qkv."

# Names of a layer's parts in the old classes -> in Core's local spec: `norm` instead of `layernorm` since Core 0.4,
# `attention` until 2020.
PARTS = {
    "input_layernorm": "input_layernorm",
    "input_norm": "input_layernorm",
    "self_attention.query_key_value": "self_attention.linear_qkv",
    "attention.query_key_value": "self_attention.linear_qkv",
    "self_attention.dense": "self_attention.linear_proj",
    "attention.dense": "self_attention.linear_proj",
    "post_attention_layernorm": "pre_mlp_layernorm",
    "post_attention_norm": "pre_mlp_layernorm",
    "mlp.dense_h_to_4h": "mlp.linear_fc1",
    "mlp.dense_4h_to_h": "mlp.linear_fc2",
    # layers of Transformer Engine within an old model (`--transformer-impl transformer_engine` without Core)
    "self_attention.layernorm_qkv": "self_attention.linear_qkv",
    "self_attention.proj": "self_attention.linear_proj",
}
FUSED_PARTS = {  # Transformer Engine's modules with several parts, such as `fc1_weight`
    "self_attention.layernorm_qkv.layer_norm": "input_layernorm",
    "layernorm_mlp.layer_norm": "pre_mlp_layernorm",
    "layernorm_mlp.fc1": "mlp.linear_fc1",
    "layernorm_mlp.fc2": "mlp.linear_fc2",
}
LAYER_NAMES = {
    f"{old}{mark}{tail}": f"{new}.{tail}"
    for names, mark in ((PARTS, "."), (FUSED_PARTS, "_"))
    for old, new in names.items()
    for tail in ("weight", "bias")
}

NAMES = {
    "embedding.word_embeddings.weight": "embedding.word_embeddings.weight",
    "embedding.position_embeddings.weight": "embedding.position_embeddings.weight",
    "output_layer.weight": "output_layer.weight",
    # the last pipeline stage's own copy of tied embeddings
    "word_embeddings_for_head.weight": "output_layer.weight",
}
# The embeddings of the first files, before a state dict was nested.
NAMES |= {key.removeprefix("embedding."): name for key, name in NAMES.items() if key.startswith("embedding.")}

STACK = re.compile(
    r"(?:encoder|transformer)\.(?:layers\.(?P<layer>0|[1-9]\d*)\.(?P<part>.+)"
    r"|(?P<final>final_layernorm|final_norm)\.(?P<tail>weight|bias))"
)
OLD = re.compile(r"(language_model\.(encoder|transformer)|transformer)\.(layers|final_)|word_embeddings_for_head\.")
MAX_DEPTH = 8  # nested dicts; a damaged file may contain itself


def is_old(model: Mapping[str, Any]) -> bool:
    """Return whether the `model` of a file belongs to the old classes.
    Only Core's state dicts are flat at the top level.
    """
    return isinstance(model.get("language_model"), Mapping) or any(OLD.match(key) for key, _ in _leaves(model))


def named(model: Mapping[str, Any]) -> dict[str, View]:
    """Return the tensors of one rank under the names of Core's local spec, with unchanged rows.

    Raises:
        MappingError: keys have no place in a GPT model.
    """
    renamed: dict[str, View] = {}
    unknown = []
    for key, value in _leaves(model):
        if key.endswith("_extra_state"):  # scaling factors of FP8
            continue
        name = _name_in_core(key)
        if name is None or not isinstance(value, View):
            unknown.append(key)
        elif name in renamed:
            raise MappingError(f"`{value.path}` holds `{key}` twice, under different names")
        else:
            renamed[name] = value
    if unknown:
        paths = sorted({f"`{view.path}`" for view in renamed.values()})
        raise MappingError(
            f"{len(unknown)} keys{f' in {paths[0]}' if paths else ''} have no place in a GPT model",
            items=fold(unknown),
            hint="of Megatron-LM's models before Core, GPT is read: no BERT, T5, Retro, vision or Switch experts",
        )
    return renamed


def _leaves(tree: Mapping[str, Any], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested dicts with their dotted keys."""
    if depth > MAX_DEPTH:
        raise UnreadableCheckpoint(f"`{prefix[:80]}` is nested too deeply for a state dict")
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.", depth + 1)
        else:
            yield f"{prefix}{key}", value


def _name_in_core(key: str) -> str | None:
    key = key.removeprefix("language_model.")
    if key in NAMES:
        return NAMES[key]
    matched = STACK.fullmatch(key)
    if matched is None:
        return None
    if matched["final"]:
        return f"decoder.final_layernorm.{matched['tail']}"
    name = LAYER_NAMES.get(matched["part"])
    return name and f"decoder.layers.{matched['layer']}.{name}"


def has_output_layer(stage: Mapping[str, Any]) -> bool:
    """Return whether the model has an output layer of its own; a tied model has a copy of the embedding on the last of
    several stages.
    """
    return any(key.removeprefix("language_model.") == "output_layer.weight" for key, _ in _leaves(stage))
