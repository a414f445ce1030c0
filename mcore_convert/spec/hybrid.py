"""Layers of a hybrid: each a Mamba mixer, attention, an MLP or experts, with one letter in Megatron's arguments.

Such a model is Megatron Core's `MambaModel`, and `HybridModel` since 0.18. Facts are from 0.12 to 0.19
(`ssm/mamba_hybrid_layer_allocation.py`, `models/hybrid/hybrid_layer_allocation.py`, `megatron/training/arguments.py`).
Up to 0.16 the pattern is `hybrid_override_pattern`, or follows from two ratios. Since 0.17 it is
`hybrid_layer_pattern`, with `|` between pipeline stages and `/` before the layers that predict further tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mcore_convert.errors import ConfigError

MAMBA, ATTENTION, MLP, EXPERTS = "M", "*", "-", "E"
LETTERS = (MAMBA, ATTENTION, MLP, EXPERTS)
STAGE, PREDICTING = "|", "/"
PATTERN, OLD_PATTERN = "hybrid_layer_pattern", "hybrid_override_pattern"
RATIOS = ("hybrid_attention_ratio", "hybrid_mlp_ratio")  # the shares of attention layers and of MLPs

# Values of `--spec` in both generations, each also for inference, with the same layers.
SPECS = (
    ["megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"],
    ["megatron.core.models.mamba.mamba_layer_specs", "mamba_inference_stack_spec"],
    ["megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"],
    ["megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_inference_stack_spec"],
)
# Specs of 0.20 whose layers `M` are not Mamba mixers, but gated products of Householder reflections.
PRODUCT_SPECS = tuple(
    ["megatron.core.models.hybrid.hybrid_layer_specs", f"{name}_stack_spec"]
    for name in ("gated_delta_product", "gated_delta_product_inference", "gdp", "gdp_inference")
)
# Megatron-LM's default sizes; without a number of heads, the inner size is twice the hidden size.
SIZES = {"mamba_state_dim": 128, "mamba_head_dim": 64, "mamba_num_groups": 8, "mamba_num_heads": None}
EXPANSION = 2
KERNEL = 4  # size of the convolution's kernel, which no argument changes
EPSILON = 1e-5  # of the norm within a mixer, which no argument changes


def is_hybrid(args: Mapping[str, Any]) -> bool:
    """Return whether a run with these arguments builds a hybrid."""
    spec = args.get("spec")
    return (
        any(args.get(name) is not None for name in (PATTERN, OLD_PATTERN))
        or any(args.get(name) for name in ("is_hybrid_model", *RATIOS))
        or (isinstance(spec, list | tuple) and list(spec) in SPECS)
    )


def stated_pattern(args: Mapping[str, Any]) -> Any:
    """Return the pattern as stored, or computed from the ratios; None if the model is not a hybrid.

    Raises:
        ConfigError: the ratios are invalid.
    """
    if not is_hybrid(args):
        return None
    stored = next((args[name] for name in (PATTERN, OLD_PATTERN) if args.get(name) is not None), None)
    return stored if stored is not None else _by_ratios(args)


def letters_of(args: Mapping[str, Any], num_layers: int) -> str | None:
    """Return one letter per layer of a hybrid; None if the model is not a hybrid.

    Raises:
        ConfigError: the pattern has other letters, or another number of layers.
    """
    pattern = stated_pattern(args)
    if pattern is None:
        return None
    letters = _of_decoder(str(pattern)).replace(STAGE, "")
    if not isinstance(pattern, str) or len(letters) != num_layers:
        raise ConfigError(f"`{PATTERN}` = {pattern!r} does not say what each of {num_layers} layers is")
    strange = sorted(set(letters) - set(LETTERS))
    if strange:
        known = "M (Mamba), * (attention), - (MLP) and E (experts)"
        raise ConfigError(f"`{PATTERN}` = {pattern!r} has the layers {', '.join(strange)}: known are {known}")
    return letters


def normalised(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a hybrid in one spelling,
    with the stages moved from the pattern to the pipeline layout.
    """
    pattern, layout = stated_pattern(args), pipeline_layout_of(args)
    sizes = {name: value for name, value in SIZES.items() if args.get(name) is None}
    return {
        **sizes,
        "mamba_num_heads": num_heads({**args, **sizes}),
        "is_hybrid_model": True,
        PATTERN: pattern.replace(STAGE, "") if isinstance(pattern, str) else pattern,
        OLD_PATTERN: None,
        **dict.fromkeys(RATIOS, 0.0),
        **({} if layout is None else {"pipeline_model_parallel_layout": layout}),
    }


def recorded(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that another program's hybrid class implies in addition to its fields."""
    stated: dict[str, Any] = {"is_hybrid_model": True}
    pattern = next((fields[name] for name in (PATTERN, OLD_PATTERN) if isinstance(fields.get(name), str)), None)
    if fields.get("num_layers") is None and pattern is not None:
        stated["num_layers"] = len(_of_decoder(pattern).replace(STAGE, ""))
    return stated


def num_heads(args: Mapping[str, Any]) -> Any:
    """Return the number of heads of a mixer; computed from the other sizes if the arguments lack it."""
    stated, hidden, head = (args.get(name) for name in ("mamba_num_heads", "hidden_size", "mamba_head_dim"))
    if stated is None and isinstance(hidden, int) and isinstance(head, int) and head > 0:
        return EXPANSION * hidden // head
    return stated


def pipeline_layout_of(args: Mapping[str, Any]) -> str | None:
    """Return the stages in the pattern as a Megatron pipeline layout; None if it has none."""
    pattern = args.get(PATTERN)
    if not isinstance(pattern, str) or STAGE not in pattern:
        return None
    stages = _of_decoder(pattern).split(STAGE)
    return f"E{STAGE.join('t' * len(stage) for stage in stages)}L"


def with_stages(letters: str, counts: Iterable[int]) -> str:
    """Return the pattern with separators between stages of `counts` layers."""
    parts, start = [], 0
    for count in counts:
        parts.append(letters[start : start + count])
        start += count
    return STAGE.join(parts)


def _of_decoder(pattern: str) -> str:
    """Return a pattern without the layers that predict further tokens."""
    return pattern.partition(PREDICTING)[0]


def _by_ratios(args: Mapping[str, Any]) -> str:
    """Return the pattern for the shares of attention layers and MLPs (`_allocate_auto`)."""
    count = args.get("num_layers")
    shares = [args.get(name) or 0.0 for name in RATIOS]
    if type(count) is not int or not all(isinstance(each, int | float) and 0 <= each <= 1 for each in shares):
        raise ConfigError(f"{' and '.join(f'`{name}`' for name in RATIOS)} = {shares} of {count} layers are no shares")
    attention, mlps = (round(count * share) for share in shares)
    letters = [MAMBA] * count
    for place in _spread(range(count), (count - attention) / (attention + 1)):
        letters[place] = ATTENTION
    if mlps:
        free = [place for place, letter in enumerate(letters) if letter == MAMBA]
        for place in _spread(free, (count - attention - mlps) / mlps):
            letters[place] = MLP
    return "".join(letters)


def _spread(places: Iterable[int], distance: float) -> list[int]:
    """Return places spread at about a distance from each other, and from the start."""
    chosen, left = [], distance
    for place in places:
        if left < 0.5:
            chosen.append(place)
            left += distance
        else:
            left -= 1
    return chosen
