"""Megatron-LM's model classes before Core, in `model_optim_rng.pt`: the order of q, k and v, and the arguments.

Names are converted to those of Core's local spec (`old_names`), and the rows of `query_key_value` to Core's order, both
for one rank. Nothing is copied: another order becomes more views of the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mcore_convert.errors import ConfigError, MappingError, UnreadableCheckpoint
from mcore_convert.formats.mp_rank.old_names import QKV, has_output_layer, is_old, named
from mcore_convert.spec.shard import Box
from mcore_convert.storage.views import Slot, View

__all__ = ["QKV", "arguments_from", "behaved", "core_tensors", "is_old", "named", "option", "qkv_slots"]

# `checkpoint_version` of a file (Megatron-LM, `checkpointing.py`); absent before 2020-09-29, which means 0.
VERSIONS = (0, 1, 2, 3)

# Weights that every model has, with their number of dimensions; other sizes follow from their shapes.
_LAYER = "decoder.layers.0."
ANCHORS = {
    _LAYER + "input_layernorm.weight": 1,
    _LAYER + QKV + "weight": 2,
    _LAYER + "self_attention.linear_proj.weight": 2,
    _LAYER + "mlp.linear_fc1.weight": 2,
    _LAYER + "mlp.linear_fc2.weight": 2,
    "embedding.word_embeddings.weight": 2,
}


def core_tensors(model: Mapping[str, Any], version: float, *, heads: int, kv_channels: int) -> dict[str, list[Slot]]:
    """Return the tensors of one rank with the names of Core's local spec and Core's order of q, k and v.

    Layers keep their numbers, from 0 on every pipeline stage. Boxes are those of the rank's local tensors.

    Args:
        model: the `model` (or `model0`, ..) of a file, with a View in place of every tensor; nested or flat.
        version: the file's `checkpoint_version`, 0 if it has none.
        heads: number of attention heads on this rank, `num_attention_heads / tp`.
        kv_channels: the size of a head.

    Raises:
        MappingError: keys have no place in a GPT model, or q, k and v do not fit the heads.
        UnreadableCheckpoint: the version is unknown, or the model is not a state dict.
    """
    if version not in VERSIONS:
        raise UnreadableCheckpoint(
            f"`checkpoint_version` = {version!r} is not known", hint="Megatron-LM has written 0 (none), 1, 2 and 3"
        )
    tensors = {}
    for name, view in named(model).items():
        if QKV in name:
            tensors[name] = qkv_slots(view, version, heads=heads, kv_channels=kv_channels)
        else:
            tensors[name] = [Slot(view, Box.whole(view.shape))]
    return tensors


def qkv_slots(view: View, version: float, *, heads: int, kv_channels: int) -> list[Slot]:
    """Return a rank's `query_key_value` (its weight, bias, or the optimizer's state of either)
    in the order of version 2.

    Rows of a rank with `heads` heads of `kv_channels` rows each (Megatron-LM, `fix_query_key_value_ordering`):

        0        [3, heads, kv_channels]
        1        [heads, kv_channels, 3]
        2 and 3  [heads, 3, kv_channels], as in Core; with query groups [groups, (q.. k v), kv_channels]

    Raises:
        MappingError: before version 2, there are not three rows per channel and head.
    """
    if version >= 2:
        return [Slot(view, Box.whole(view.shape))]
    if not view.shape or view.shape[0] != 3 * heads * kv_channels:
        raise MappingError(
            f"`query_key_value` in `{view.path}` is {list(view.shape)}, which is not q, k and v of {heads} heads of "
            f"{kv_channels} channels on each rank",
            hint="is the number of heads right? --arg num_attention_heads=...",
        )
    rest, row = view.shape[1:], view.strides[0]
    shape, zeros = (kv_channels, *rest), (0,) * len(rest)
    slots = []
    for head in range(heads):
        for part in range(3):
            if version == 0:
                first, step = (part * heads + head) * kv_channels, 1
            else:
                first, step = head * kv_channels * 3 + part, 3
            moved = View(view.path, view.offset + first * row, shape, (step * row, *view.strides[1:]), view.dtype)
            slots.append(Slot(moved, Box(((head * 3 + part) * kv_channels, *zeros), shape)))
    return slots


def behaved(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the stored arguments of an old run, completed by its behaviour that had no argument yet.

    Before the fused gelu (May 2020) the exact form was used, or with `--openai-gelu` the tanh form of the fused gelu.

    Raises:
        ConfigError: layers share their parameters (`--num-unique-layers`, until October 2020).
    """
    args = dict(stored)
    if args.get("num_unique_layers") not in (None, args.get("num_layers")):
        raise ConfigError(
            f"`num_unique_layers` = {args['num_unique_layers']}: layers that share parameters, which Megatron Core "
            "does not have"
        )
    if args.get("bias_gelu_fusion") is None:
        args["bias_gelu_fusion"] = bool(args.get("openai_gelu"))
    return args


def option(name: str) -> str:
    """Return the option of this package's command line for an argument."""
    return f"--arg {name}=..."


def arguments_from(stages: Sequence[Mapping[str, Any]], options: Mapping[str, Any], *, tp: int = 1) -> dict[str, Any]:
    """Return the Megatron arguments of a model whose files store none: inferred from shapes,
    and from `options` for the rest.

    Shapes do not determine the number of heads, nor the number of positions without learned ones. An option that
    contradicts a shape is refused; one that no shape determines (`layernorm_epsilon`, `rotary_base`, ..) is used. The
    rest, such as the tanh gelu of NVIDIA's `megatron_lm_345m`, has Megatron-LM's defaults (`arguments.normalise`).

    Args:
        stages: the `model` of tensor-parallel rank 0 on every pipeline stage, in the order of the forward pass.
        options: arguments under Megatron's names; None counts as absent.
        tp: how many ranks share each tensor.

    Raises:
        ConfigError: options are missing, or contradict the shapes.
        MappingError: as `named`.
        UnreadableCheckpoint: stages have no layers or embeddings, or shapes fit no model.
    """
    given = {name: value for name, value in options.items() if value is not None}
    held = [named(stage) for stage in stages]
    num_layers = sum(map(_num_layers, held))
    tensors = {name: view for views in reversed(held) for name, view in views.items()}  # of the first stage that has it
    where = f"`{next(iter(tensors.values())).path}`" if tensors else "the checkpoint"
    positions = tensors.get("embedding.position_embeddings.weight")
    missing = [name for name, rank in ANCHORS.items() if name not in tensors or len(tensors[name].shape) != rank]
    if positions is not None and len(positions.shape) != 2:
        missing.append("embedding.position_embeddings.weight")
    if missing:
        raise UnreadableCheckpoint(f"{where} and the other stages do not hold a whole model", items=missing)
    norm, qkv, proj, fc1, fc2, embedding = (tensors[name] for name in ANCHORS)
    needed = ["num_attention_heads", *(["max_position_embeddings"] if positions is None else [])]
    absent = [option(name) for name in needed if name not in given]
    if absent:
        raise ConfigError(
            f"{where} stores no arguments, and its shapes do not tell everything",
            items=[f"{name} is missing" for name in absent],
            hint=f"pass {' and '.join(absent)}",
        )
    if fc1.shape[0] not in (fc2.shape[1], 2 * fc2.shape[1]):
        raise UnreadableCheckpoint(f"the matrices of the MLP in {where} are {list(fc1.shape)} and {list(fc2.shape)}")
    inferred: dict[str, Any] = {
        "num_layers": num_layers,
        "hidden_size": norm.shape[0],
        "ffn_hidden_size": fc2.shape[1] * tp,
        **_heads_of(given["num_attention_heads"], proj.shape[1] * tp, qkv.shape[0] * tp, where),
        "padded_vocab_size": embedding.shape[0] * tp,
        "position_embedding_type": given.get("position_embedding_type", "rope"),
        "normalization": "LayerNorm" if _LAYER + "input_layernorm.bias" in tensors else "RMSNorm",
        "add_bias_linear": _LAYER + "self_attention.linear_proj.bias" in tensors,
        "add_qkv_bias": _LAYER + QKV + "bias" in tensors,
        "swiglu": fc1.shape[0] == 2 * fc2.shape[1],  # the only gate that the old classes have
        "untie_embeddings_and_output_weights": any(map(has_output_layer, stages)),
        "fp16": embedding.dtype == "float16",
        "bf16": embedding.dtype == "bfloat16",
    }
    if positions is not None:
        inferred |= {"position_embedding_type": "learned_absolute", "max_position_embeddings": positions.shape[0]}
    wrong = [
        f"--arg {name}={value}: the shapes say {inferred[name]}"
        for name, value in given.items()
        if name in inferred and inferred[name] != value
    ]
    if wrong:
        raise ConfigError(f"options contradict {where}", items=wrong)
    return given | inferred


def _heads_of(heads: Any, query: int, rows: int, where: str) -> dict[str, Any]:
    """Return the arguments of heads and groups for `query` rows of q among `rows` rows of q, k and v."""
    kv = query // heads if type(heads) is int and heads > 0 and query % heads == 0 else 0
    groups, rest = divmod(rows - query, 2 * kv) if kv else (0, 0)
    if groups < 1 or rest or heads % groups:
        raise ConfigError(
            f"--arg num_attention_heads={heads} does not fit {where}: "
            f"it has {query} rows of queries and {rows - query} of keys and values"
        )
    return {
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "group_query_attention": groups != heads,
        "kv_channels": kv,
    }


def _num_layers(tensors: Mapping[str, View]) -> int:
    """Return the number of layers of one stage, which are numbered from 0."""
    numbers = {int(name.split(".")[2]) for name in tensors if name.startswith("decoder.layers.")}
    if numbers != set(range(len(numbers))):
        path: Path = next(iter(tensors.values())).path
        lost = sorted(set(range(max(numbers) + 1)) - numbers)
        raise UnreadableCheckpoint(f"`{path}` lacks layers", items=[f"layer {number}" for number in lost])
    return len(numbers)
