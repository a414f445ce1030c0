"""Parts of each decoder layer, from Megatron's arguments: layers may differ.

A row of a table may belong to one part, and exists in the layers with that part. A layer of a hybrid has only one part.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from mcore_convert.errors import ConfigError
from mcore_convert.spec import hybrid

# The two forms of the second half of a layer, and the forms of its first half if layers differ in it.
MLP, EXPERTS = "mlp", "experts"
ATTENTION, LINEAR, MAMBA = "attention", "linear_attention", "mamba"
# The only supported `experimental_attention_variant`, and its other name in 0.20 (`transformer_config.py`).
GATED_DELTA_NET, GATED_DELTA_NET_IN_SHORT = "gated_delta_net", "gdn"

OF_HYBRID = {hybrid.MAMBA: MAMBA, hybrid.ATTENTION: ATTENTION, hybrid.MLP: MLP, hybrid.EXPERTS: EXPERTS}

Parts = tuple[frozenset[str], ...]

MAX_LAYERS = 10_000  # bounds the time and memory that a damaged number or expression can cost


def parts_of(args: Mapping[str, Any], num_layers: int) -> Parts:
    """Return the parts of each layer, from normalised arguments.

    Raises:
        ConfigError: an argument is not a pattern of that many layers.
    """
    letters = hybrid.letters_of(args, num_layers)
    if letters is not None:
        return tuple(frozenset({OF_HYBRID[letter]}) for letter in letters)
    sparse = expert_layers(args.get("moe_layer_freq"), num_layers) if args.get("num_experts") else [False] * num_layers
    return tuple(
        frozenset({EXPERTS if has_experts else MLP, LINEAR if is_linear else ATTENTION})
        for has_experts, is_linear in zip(sparse, linear_layers(args, num_layers), strict=True)
    )


def are_stacked(args: Mapping[str, Any]) -> bool:
    """Return whether one key of `torch_dist` holds a weight of all layers, because Megatron Core treats them as equal.

    With a list it does not, even if all entries are 1 (Megatron Core 0.10 to 0.19, `transformer_block.py`,
    `sharded_state_dict`).
    """
    if hybrid.is_hybrid(args):  # each layer has keys of its own (`mamba_block.py`, `sharded_state_dict`)
        return False
    experts_alike = not args.get("num_experts") or args.get("moe_layer_freq") in (None, 1)
    return experts_alike and args.get("linear_attention_freq") in (None, 1)


def expert_layers(frequency: Any, num_layers: int) -> list[bool]:
    """Return which layers have experts: every n-th from the first on, or those with a 1 in a list.

    The list may be an expression, such as `([0]*1+[1]*3)*2` on the command line (`arguments.py`, `moe_freq_type`;
    `gpt_layer_specs.py`, `get_gpt_decoder_layer_specs`).

    Raises:
        ConfigError: it is neither, or describes another number of layers.
    """
    value = _evaluated(frequency, "moe_layer_freq")
    if value is None or (isinstance(value, int) and value > 0):
        return [layer % (value or 1) == 0 for layer in range(num_layers)]
    if isinstance(value, list) and len(value) == num_layers and set(value) <= {0, 1}:
        return [bool(entry) for entry in value]
    raise ConfigError(f"`moe_layer_freq` = {frequency!r} does not say which of {num_layers} layers have experts")


def linear_layers(args: Mapping[str, Any], num_layers: int) -> list[bool]:
    """Return which layers have linear attention: all but every n-th, or those with a 1 in a list.

    From Megatron Core 0.16.1, `experimental_attention_variant_module_specs.py`, `get_linear_attention_pattern`.

    Raises:
        ConfigError: `linear_attention_freq` is neither, or describes another number of layers.
    """
    if args.get("experimental_attention_variant") != GATED_DELTA_NET:
        return [False] * num_layers
    frequency = args.get("linear_attention_freq")
    value = _evaluated(frequency, "linear_attention_freq")
    if isinstance(value, int) and value > 0:
        return [(layer + 1) % value != 0 for layer in range(num_layers)]
    if isinstance(value, list) and len(value) == num_layers and set(value) <= {0, 1}:
        return [bool(entry) for entry in value]
    raise ConfigError(
        f"`linear_attention_freq` = {frequency!r} does not say which of {num_layers} layers have linear attention"
    )


def check_number(num_layers: Any, name: str = "num_layers") -> None:
    """Refuse more layers than any model has.

    Raises:
        ConfigError: there are more than MAX_LAYERS.
    """
    if isinstance(num_layers, int) and num_layers > MAX_LAYERS:
        raise ConfigError(f"`{name}` = {num_layers} is more than any model has")


def plain_frequency(frequency: Any, name: str = "moe_layer_freq") -> Any:
    """Return a frequency with an expression evaluated; None stays as it is."""
    value = _evaluated(frequency, name)
    return frequency if value is None else value


def _evaluated(frequency: Any, name: str) -> int | list[Any] | None:
    if isinstance(frequency, bool):
        raise ConfigError(f"`{name}` = {frequency!r} is not a number of layers")
    if isinstance(frequency, str):
        try:
            value: int | list[Any] = _value(ast.parse(frequency.strip(), mode="eval").body)
            return value
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ConfigError(f"`{name}` = {frequency!r} is neither a number nor a list of 0 and 1") from error
    return list(frequency) if isinstance(frequency, list | tuple) else frequency


def _value(node: ast.expr) -> Any:
    """Return the value of an expression of integers, lists, `+` and `*`."""
    match node:
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            return number
        case ast.List(elts=entries):
            return [_value(entry) for entry in entries]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            first, second = _value(left), _value(right)
            if isinstance(first, list) and isinstance(second, list):
                return first + second
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            first, second = _value(left), _value(right)
            if isinstance(first, int):
                first, second = second, first
            if isinstance(first, list) and isinstance(second, int) and len(first) * second <= MAX_LAYERS:
                return first * second
    raise ValueError(ast.dump(node))
