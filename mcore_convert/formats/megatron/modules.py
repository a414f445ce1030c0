"""Names of weights in Megatron Core's modules, and the order in which modules register parameters.

`torch_dist` has one name for a weight. The `torch` format has the module's own name, which depends on the layer spec of
the run, and the flat buffers of a distributed optimizer follow the modules' order.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from typing import Any

from mcore_convert.spec.family import Weight
from mcore_convert.spec.releases import MTP_MODEL_LAYER as MTP_NAMES
from mcore_convert.spec.releases import NEWEST, OWN_CONVOLUTIONS, WHOLE_DOWN_PROJECTIONS, Release
from mcore_convert.spec.shard import COLUMN, Shard

# `local` is the spec of Megatron itself; `transformer_engine`, the default, fuses each norm into the layer after it.
LOCAL, TRANSFORMER_ENGINE = "local", "transformer_engine"
IMPLEMENTATIONS = (LOCAL, TRANSFORMER_ENGINE)

# Storage of experts: one module each, or one for all with numbered weights (Transformer Engine's grouped linears).
SEQUENTIAL, GROUPED = "sequential", "grouped"

# State of a module without FP8, in the only form that Transformer Engine 1.x to 2.x, Megatron's grouped linears and its
# local modules all accept: a byte tensor of pickle.dumps(None).
EXTRA_STATE = pickle.dumps(None, protocol=4)

# The final norms of a `GPTModel` and of a hybrid, and that of layers that predict further tokens.
FINAL_NORMS, MTP_FINAL_NORM = ("decoder.final_layernorm", "decoder.final_norm"), "mtp.layers.{mtp}.final_layernorm"
# In the local spec, layers with experts have their pre-MLP norm under the name of dense layers.
DENSE_NORM, EXPERT_NORM = "mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."
EXPERT = "mlp.experts.experts.{expert}."
FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "self_attention.in_proj.layer_norm_": "input_layernorm.",
    "self_attention.linear_q_up_proj.layer_norm_": "self_attention.q_layernorm.",
    "self_attention.linear_kv_up_proj.layer_norm_": "self_attention.kv_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
    "mixer.in_proj.layer_norm_": "norm.",
}
# A weight that only latent attention has; its local layer spec keeps its own names in `torch_dist`, too.
LATENT = "self_attention.linear_kv_up_proj.weight"

# The inner layer of one that predicts further tokens, and its name in Megatron Core's modules since 0.17.
MTP_LAYER, MTP_MODEL_LAYER = ".transformer_layer.", ".mtp_model_layer."

# A mixer's convolution: a module up to 0.18 and in `torch_dist` (`mamba_mixer.py`, `sharded_state_dict`), later not.
CONVOLUTION, OWN_CONVOLUTION = "mixer.conv1d.", "mixer.conv1d_"

# Down projections of latent attention. Megatron's own column-parallel linears shard them, and Transformer Engine's did
# up to 0.13; since 0.14 they are replicated there (`gpt_layer_specs.py`, `backend.linear()`).
DOWN_PROJECTIONS = ("self_attention.linear_q_down_proj.weight", "self_attention.linear_kv_down_proj.weight")

# Order of the parts of a layer in `module.parameters()`; within a part in the order of the rows: weight, then bias.
LOCAL_ORDER = (
    "input_layernorm.",
    OWN_CONVOLUTION,
    "mixer.dt_bias",
    "mixer.A_log",
    "mixer.D",
    "mixer.in_proj.",
    CONVOLUTION,
    "mixer.norm.",
    "mixer.out_proj.",
    "norm.",
    "self_attention.dt_bias",
    "self_attention.A_log",
    "self_attention.in_proj.",
    "self_attention.conv1d.",
    "self_attention.out_norm.",
    "self_attention.out_proj.",
    "self_attention.core_attention.",
    "self_attention.linear_proj.",
    "self_attention.linear_qkv.",
    "self_attention.linear_q_proj.",
    "self_attention.linear_q_down_proj.",
    "self_attention.linear_q_up_proj.",
    "self_attention.linear_kv_down_proj.",
    "self_attention.linear_kv_up_proj.",
    "self_attention.q_layernorm.",
    "self_attention.k_layernorm.",
    "self_attention.kv_layernorm.",
    "pre_mlp_layernorm.",
    "mlp.router.",
    "mlp.linear_fc1.",
    "mlp.experts.",
    "mlp.linear_fc2.",
    "mlp.shared_experts.gate_weight",  # a parameter of the module itself, before those of inner modules
    "mlp.shared_experts.",
)
MTP_ORDER = ("enorm.", "hnorm.", "eh_proj.", "transformer_layer.", "final_layernorm.")


def implementation_in(names: Collection[str], args: Mapping[str, Any]) -> str:
    """Return the layer spec with these names; if both have them, as without norms in attention,
    that of the run's arguments.
    """
    if any(fused in name for name in names for fused in FUSED_NORMS):
        return TRANSFORMER_ENGINE
    says_nothing = any(LATENT in name for name in names) and not any("kv_layernorm." in name for name in names)
    return TRANSFORMER_ENGINE if says_nothing and args.get("transformer_impl") == TRANSFORMER_ENGINE else LOCAL


def experts_in(names: Iterable[str]) -> str:
    """Return how modules with these names store experts."""
    numbered = re.compile(r"mlp\.experts\.linear_fc1\.weight\d+(_[wv])?$")
    return GROUPED if any(numbered.search(name) for name in names) else SEQUENTIAL


@lru_cache
def name_in_module(name: str, implementation: str, experts: str) -> str:
    """Return the template of a weight in the `torch` format, from its template in `torch_dist`.

    If the name differs between releases, it is the older one (`name_in_release`).
    """
    if EXPERT in name:
        if experts == SEQUENTIAL:
            return name.replace(EXPERT, "mlp.experts.local_experts.{expert}.")
        return name.replace(EXPERT, "mlp.experts.") + "{expert}"
    if implementation == LOCAL:
        for fused, own in FUSED_NORMS.items():
            name = name.replace(fused, own)
    return name


def name_in_release(name: str, release: Release) -> str:
    """Return the name of a local tensor in the modules of a release."""
    name = name.replace(MTP_LAYER, MTP_MODEL_LAYER) if release >= MTP_NAMES else name
    return _with_convolution(name, release)


def _with_convolution(name: str, release: Release) -> str:
    return name.replace(CONVOLUTION, OWN_CONVOLUTION) if release >= OWN_CONVOLUTIONS else name


def name_in_any_release(name: str) -> str:
    """Return the name of a local tensor in the oldest release that has it."""
    return name.replace(MTP_MODEL_LAYER, MTP_LAYER).replace(OWN_CONVOLUTION, CONVOLUTION)


def in_module_order(weights: Iterable[Weight], implementation: str, release: Release) -> list[Weight]:
    """Return the rows in the order of a model's `parameters()`: embedding, layers, final norm, layers that predict
    further tokens, output layer.

    Rows of a layer are in the order of LOCAL_ORDER; fused norms precede the layer's weight.
    """

    def place(weight: Weight) -> tuple[int, int, int]:
        assert weight.mcore is not None
        if not weight.per_layer:
            ends = (("embedding.",), FINAL_NORMS)
            return next((2 * number for number, end in enumerate(ends) if weight.mcore.startswith(end)), 4), 0, 0
        name = _with_convolution(name_in_module(weight.mcore, implementation, SEQUENTIAL), release)
        if not weight.predicts:
            return 1, 0, _place_of(name.partition("{layer}.")[2], LOCAL_ORDER)
        outer = _place_of(name.partition("{mtp}.")[2], MTP_ORDER)
        _, is_inner, inner = name.partition(MTP_LAYER)
        return 3, outer, _place_of(inner, LOCAL_ORDER) if is_inner else 0

    return sorted(weights, key=place)


def _place_of(name: str, order: tuple[str, ...]) -> int:
    return next(number for number, part in enumerate(order) if name.startswith(part))


def has_extra_state(module: str, *, norms: bool) -> bool:
    """Return whether a module of this name saves an extra state: a linear layer,
    or a norm of Transformer Engine.
    """
    is_norm = module.endswith("layernorm") or module in ("enorm", "hnorm", "out_norm", "final_norm")
    is_linear = module.startswith("linear_") or module in ("eh_proj", "in_proj", "out_proj")
    return is_linear or (norms and is_norm)


def is_down_projection(weight: Weight) -> bool:
    """Return whether a weight is one of DOWN_PROJECTIONS."""
    return weight.mcore is not None and weight.mcore.endswith(DOWN_PROJECTIONS)


def shard_of(weight: Weight, implementation: str, release: Release = NEWEST) -> Shard:
    """Return the shard of a weight in the modules of a release."""
    whole = implementation == TRANSFORMER_ENGINE and release >= WHOLE_DOWN_PROJECTIONS
    return COLUMN if is_down_projection(weight) and not whole else weight.shard
