"""Refusal of checkpoints of another model than the run's, before their tensors are read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mcore_convert.errors import ConfigError
from mcore_convert.spec.config.arguments import normalise

SHAPE = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "vocab_size",
    "position_embedding_type",
    "normalization",
    "layernorm_epsilon",
    "layernorm_zero_centered_gamma",
    "qk_layernorm",
    "swiglu",
    "add_bias_linear",
    "add_qkv_bias",
    "untie_embeddings_and_output_weights",
    "num_experts",
)
# Arguments that matter only with a certain value of another argument.
ONLY_WITH: dict[tuple[str, Any], tuple[str, ...]] = {
    ("position_embedding_type", "rope"): ("rotary_base", "rotary_percent", "rotary_interleaved", "use_rope_scaling"),
    ("position_embedding_type", "learned_absolute"): ("max_position_embeddings",),
    ("use_rope_scaling", True): ("rope_scaling_factor",),
}
OF_EXPERTS = (
    "moe_ffn_hidden_size",
    "moe_layer_freq",
    "moe_router_topk",
    "moe_router_pre_softmax",
    "moe_router_score_function",
    "moe_shared_expert_intermediate_size",
    "moe_shared_expert_gate",
)


def refuse_another(args: Mapping[str, Any], stored: Mapping[str, Any], path: Path) -> None:
    """Prove that a checkpoint's arguments describe the model of a run.

    Raises:
        ConfigError: names every argument that differs.
    """
    here, there = normalise(args), normalise(stored)
    differing = [
        f"{name} = {there.get(name)!r}, here {here.get(name)!r}"
        for name in _names(here)
        if not means_the_same(here.get(name), there.get(name))
    ]
    if differing:
        raise ConfigError(
            f"`{path}` is a checkpoint of another architecture",
            items=differing,
            hint="continue with the configuration that it was written with, or choose another `run_dir`",
        )


def _names(args: Mapping[str, Any]) -> Iterator[str]:
    yield from SHAPE
    for (name, value), dependent in ONLY_WITH.items():
        if args.get(name) == value:
            yield from dependent
    if args.get("num_experts"):
        yield from OF_EXPERTS


def means_the_same(here: Any, there: Any) -> bool:
    """Return whether two values of an argument are equal, or both empty."""
    return bool(here == there or (not here and not there))
