"""Names of weights in Megatron Core's modules, and the order in which modules register parameters.

`torch_dist` has one name for a weight. The `torch` format has the module's own, which depends on the layer spec that
the run was built from, and the flat buffers of a distributed optimizer follow the modules' order.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterable
from functools import lru_cache

from mcore_convert.spec.family import Weight

# `local` is the spec of Megatron itself; `transformer_engine`, the default, fuses each norm into the layer after it.
LOCAL, TRANSFORMER_ENGINE = "local", "transformer_engine"
IMPLEMENTATIONS = (LOCAL, TRANSFORMER_ENGINE)

# How experts are kept: one module each, or one for all with numbered weights (Transformer Engine's grouped linears).
SEQUENTIAL, GROUPED = "sequential", "grouped"

# What a module without FP8 state saves, in the one form that Transformer Engine 1.x to 2.x, Megatron's grouped linears
# and its local modules all accept: a byte tensor of pickle.dumps(None).
EXTRA_STATE = pickle.dumps(None, protocol=4)

FINAL_NORM = "decoder.final_layernorm"
# Layers whose experts were built from the local spec have their pre-MLP norm under the name that dense layers use.
DENSE_NORM, EXPERT_NORM = "mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."
EXPERT = "mlp.experts.experts.{expert}."
FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}

# The order of the parts of a layer in `module.parameters()`; within a part that of the rows: weight, then bias.
LOCAL_ORDER = (
    "input_layernorm.",
    "self_attention.linear_proj.",
    "self_attention.linear_qkv.",
    "self_attention.q_layernorm.",
    "self_attention.k_layernorm.",
    "pre_mlp_layernorm.",
    "mlp.router.",
    "mlp.linear_fc1.",
    "mlp.experts.",
    "mlp.linear_fc2.",
    "mlp.shared_experts.",
)


def implementation_in(names: Iterable[str]) -> str:
    """Return the layer spec whose modules have these names."""
    fused = any("linear_qkv.layer_norm_weight" in name for name in names)
    return TRANSFORMER_ENGINE if fused else LOCAL


def experts_in(names: Iterable[str]) -> str:
    """Return how modules with these names keep experts."""
    numbered = re.compile(r"mlp\.experts\.linear_fc1\.weight\d+(_[wv])?$")
    return GROUPED if any(numbered.search(name) for name in names) else SEQUENTIAL


@lru_cache
def name_in_module(name: str, implementation: str, experts: str) -> str:
    """The template of a weight in the `torch` format, from its template in `torch_dist`."""
    if EXPERT in name:
        if experts == SEQUENTIAL:
            return name.replace(EXPERT, "mlp.experts.local_experts.{expert}.")
        return name.replace(EXPERT, "mlp.experts.") + "{expert}"
    if implementation == LOCAL:
        for fused, own in FUSED_NORMS.items():
            name = name.replace(fused, own)
    return name


def in_module_order(weights: Iterable[Weight], implementation: str) -> list[Weight]:
    """The rows as a model's `parameters()` have them: embedding, layers, final norm, output layer.

    Rows of a layer are ordered by the parts of LOCAL_ORDER; where norms are fused, they precede the layer's weight.
    """

    def place(weight: Weight) -> tuple[int, int]:
        assert weight.mcore is not None
        if not weight.per_layer:
            return (0 if weight.mcore.startswith("embedding.") else 2), 0
        name = name_in_module(weight.mcore, implementation, SEQUENTIAL).partition("{layer}.")[2]
        return 1, next(number for number, part in enumerate(LOCAL_ORDER) if name.startswith(part))

    return sorted(weights, key=place)
