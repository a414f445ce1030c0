"""Rows of all weights of a Megatron Core `GPTModel` or hybrid, from its arguments, to reshard without a family.

Names are those of `torch_dist` with placeholders for layer and expert, as in Transformer Engine models. The order is
that of the forward pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mcore_convert.errors import ConfigError
from mcore_convert.spec import hybrid
from mcore_convert.spec.config.mapping import ConfigMapping
from mcore_convert.spec.dims import has_expert_bias
from mcore_convert.spec.family import Family, Weight, segmented
from mcore_convert.spec.layers import ATTENTION, EXPERTS, GATED_DELTA_NET, LINEAR, MAMBA, MLP, linear_layers
from mcore_convert.spec.shard import COLUMN, GATED_COLUMN, REPLICATED, ROW, Shard

# The output layer of a tied model is the embedding, and has no tensor of its own.
EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
FINAL_NORM, HYBRID_FINAL_NORM = "decoder.final_layernorm.weight", "decoder.final_norm.weight"
FINAL_NORMS = (FINAL_NORM, HYBRID_FINAL_NORM)
LAYER = "decoder.layers.{layer}."
EXPERT = LAYER + "mlp.experts.experts.{expert}."
MTP = "mtp.layers.{mtp}."

# Segments of the gated delta net's input projection, and of its convolution over queries, keys and values.
CONVOLUTION = {"query": "linear_keys", "key": "linear_keys", "value": "linear_values"}
IN_PROJ = {**CONVOLUTION, "z": "linear_values", "beta": "linear_heads", "alpha": "linear_heads"}

# Segments of a Mamba mixer; its convolution's bias has them, too (`mamba_mixer.py`, `sharded_state_dict`).
MIXER_CONVOLUTION = {"x": "mamba_inner", "B": "mamba_states", "C": "mamba_states"}
MIXER_IN_PROJ = {"z": "mamba_inner", **MIXER_CONVOLUTION, "dt": "mamba_heads"}

# Arguments that change the set of weights in ways that are not described here, with their supported values.
UNKNOWN: dict[str, tuple[Any, ...]] = {
    "mtp_use_repeated_layer": (None, False),
    "mtp_hybrid_override_pattern": (None,),
    "experimental_attention_variant": (None, GATED_DELTA_NET),
    "heterogeneous_layers_config_path": (None,),
    "heterogeneous_layers_config_encoded_json": (None,),
    "softmax_type": (None, "vanilla", "off-by-one", "learnable"),
    "moe_latent_size": (None,),
    "moe_mlp_glu_interleave_size": (None,),
    "moe_shared_expert_glu_interleave_size": (None,),
    "moe_extended_tp": (None, False),
    "enable_mhc_connections": (None, False),
}


# Number of shards of a weight -> number of tensor-parallel ranks. Both are equal, unless weights are sharded further
# and gathered for use, which changes what a rank holds (Megatron-LM 0.19, `model_parallel_config.py`).
WEIGHT_SHARDS = {
    "tensor_parallel_num_weight_shards": "tensor_model_parallel_size",
    "expert_tensor_parallel_num_weight_shards": "expert_tensor_parallel_size",
}


def refusals(args: Mapping[str, Any]) -> list[str]:
    """Return one line for each reason why the weights of a model with these arguments are unknown."""
    tp = args.get("tensor_model_parallel_size") or 1
    again = [
        f"`{name}` = {args[name]!r}, with `{size}` = {args.get(size) or tp}"
        for name, size in WEIGHT_SHARDS.items()
        if args.get(name) not in (None, args.get(size) or tp)
    ]
    if args.get("mtp_num_layers") and not args.get("untie_embeddings_and_output_weights"):
        again.append(f"`mtp_num_layers` = {args['mtp_num_layers']!r}, with embeddings that are tied")
    if args.get("experimental_attention_variant") == GATED_DELTA_NET:
        again += _refusals_of_linear_attention(args)
    if hybrid.is_hybrid(args):
        again += _refusals_of_hybrids(args)
    return again + [f"`{name}` = {args[name]!r}" for name, plain in UNKNOWN.items() if args.get(name) not in plain]


def _refusals_of_linear_attention(args: Mapping[str, Any]) -> list[str]:
    """Return combinations with linear attention that no release builds, or that releases build differently."""
    stated = f"`experimental_attention_variant` = '{GATED_DELTA_NET}'"
    if args.get("multi_latent_attention"):
        return [f"{stated}, with `multi_latent_attention` = True"]
    if args.get("mtp_num_layers") and linear_layers(args, args["num_layers"])[-1]:
        # predicting layers have plain attention in 0.16, and that of the last layer in 0.19 (`gpt_builders.py`)
        return [f"{stated} in the last layer, with `mtp_num_layers` = {args['mtp_num_layers']!r}"]
    return []


# Features that layers of a hybrid lack, or that other arguments control, with the values that leave them off.
NOT_OF_HYBRIDS: dict[str, tuple[Any, ...]] = {
    "multi_latent_attention": (None, False),
    "experimental_attention_variant": (None,),
    "qk_layernorm": (None, False),  # `mamba_layer_specs.py` has no such norm, and silently builds none
    "mtp_num_layers": (None, 0),
}


def _refusals_of_hybrids(args: Mapping[str, Any]) -> list[str]:
    """Return features that no layer of a hybrid has, and kinds of layers that are not described here."""
    pattern = str(hybrid.stated_pattern(args))
    stated = f"`{hybrid.PATTERN}` = {pattern!r}"
    lines = [
        f"{stated}, with `{name}` = {args[name]!r}"
        for name, plain in NOT_OF_HYBRIDS.items()
        if args.get(name) not in plain
    ]
    if isinstance(args.get("spec"), list | tuple) and list(args["spec"]) in hybrid.PRODUCT_SPECS:
        lines.append(f"`spec` = {args['spec']!r}, whose layers {hybrid.MAMBA} are no Mamba mixers")
    if hybrid.PREDICTING in pattern:
        lines.append(f"{stated} has layers that predict further tokens")
    strange = sorted(set(pattern) - {*hybrid.LETTERS, hybrid.STAGE, hybrid.PREDICTING})
    return lines + ([f"{stated} has the layers {', '.join(strange)}"] if strange else [])


def family(args: Mapping[str, Any]) -> Family:
    """Return the rows as a family without a Hugging Face model.

    Raises:
        ConfigError: the arguments require weights that are not described here.
    """
    reasons = refusals(args)
    if reasons:
        raise ConfigError("the weights of such a Megatron model are not known", items=reasons)
    return Family("gpt", (), ConfigMapping("gpt", (), ()), weights(args))


def weights(args: Mapping[str, Any]) -> tuple[Weight, ...]:
    """Return the rows of a model with these normalised Megatron arguments."""
    bias, gated = bool(args.get("add_bias_linear")), bool(args.get("swiglu") or args.get("quick_geglu"))
    qkv_bias = bias or bool(args.get("add_qkv_bias"))
    norm_bias = args.get("normalization") == "LayerNorm"
    up, up_shape = (GATED_COLUMN, "gated_") if gated else (COLUMN, "")
    rows = [_row(EMBEDDING, "vocab hidden", COLUMN, vocab=True)]
    if args.get("position_embedding_type") == "learned_absolute" and args.get("add_position_embedding", True):
        rows.append(_row("embedding.position_embeddings.weight", "positions hidden"))
    if args.get("multi_latent_attention"):
        rows += [*_latent_attention(args, norm_bias, bias), *_sinks(args)]
    else:
        linear = args.get("experimental_attention_variant") == GATED_DELTA_NET
        is_hybrid = hybrid.is_hybrid(args)
        attention = [*_attention(args, norm_bias, bias, qkv_bias), *_sinks(args)]
        rows += [replace(weight, part=ATTENTION) for weight in attention] if linear or is_hybrid else attention
        rows += [replace(weight, part=LINEAR) for weight in _gated_delta_net(norm_bias)] if linear else []
        rows += [replace(weight, part=MAMBA) for weight in _mixer(norm_bias)] if is_hybrid else []
    mlp = _norm(LAYER + "mlp.linear_fc1.layer_norm_", norm_bias)
    mlp += _linear(LAYER + "mlp.linear_fc1.", up_shape + "ffn", "hidden", up, bias)
    mlp += _linear(LAYER + "mlp.linear_fc2.", "hidden", "ffn", ROW, bias)
    rows += [replace(weight, part=MLP) for weight in mlp]
    if args.get("num_experts"):
        rows += [replace(weight, part=EXPERTS) for weight in _experts(args, norm_bias, bias, up, up_shape)]
    layers = [weight for weight in rows if weight.per_layer]
    rows += _norm("decoder.final_norm." if hybrid.is_hybrid(args) else "decoder.final_layernorm.", norm_bias)
    if args.get("mtp_num_layers"):
        rows += [row for name in ("enorm.", "hnorm.") for row in _norm(MTP + name, norm_bias)]
        rows.append(_row(MTP + "eh_proj.weight", "hidden twice_hidden", COLUMN))
        rows += [predicting(weight) for weight in layers]
        rows += _norm(MTP + "final_layernorm.", norm_bias)
    if args.get("untie_embeddings_and_output_weights"):
        rows.append(_row(OUTPUT, "vocab hidden", COLUMN, vocab=True))
    return tuple(rows)


def predicting(weight: Weight) -> Weight:
    """Return the row of a layer that predicts further tokens, from that of a decoder layer
    (`MultiTokenPredictionLayer`).
    """
    assert weight.mcore is not None
    return replace(weight, mcore=weight.mcore.replace(LAYER, MTP + "transformer_layer."))


def _attention(args: Mapping[str, Any], norm_bias: bool, bias: bool, qkv_bias: bool) -> list[Weight]:
    prefix, rows = LAYER + "self_attention.", _norm(LAYER + "self_attention.linear_qkv.layer_norm_", norm_bias)
    rows += _linear(prefix + "linear_qkv.", "qkv", "hidden", COLUMN, qkv_bias)
    if args.get("qk_layernorm"):
        rows += [row for part in "qk" for row in _norm(prefix + f"{part}_layernorm.", norm_bias, "head")]
    return rows + _linear(prefix + "linear_proj.", "hidden", "heads", ROW, bias)


def _sinks(args: Mapping[str, Any]) -> list[Weight]:
    if args.get("softmax_type") != "learnable":
        return []
    return [_row(LAYER + "self_attention.core_attention.softmax_offset", "num_heads", COLUMN)]


def _gated_delta_net(norm_bias: bool) -> list[Weight]:
    """Return the rows of linear attention by the gated delta rule, without biases (`gated_delta_net.py`)."""
    prefix = LAYER + "self_attention."
    return [
        *(_row(prefix + name, "linear_heads", COLUMN) for name in ("dt_bias", "A_log")),
        *_norm(prefix + "in_proj.layer_norm_", norm_bias),
        segmented(prefix + "in_proj.weight", "linear_in hidden", segments=IN_PROJ),
        segmented(prefix + "conv1d.weight", "linear_conv one linear_kernel", segments=CONVOLUTION),
        *_norm(prefix + "out_norm.", norm_bias, "linear_head"),
        _row(prefix + "out_proj.weight", "hidden linear_values", ROW),
    ]


def _mixer(norm_bias: bool) -> list[Weight]:
    """Return the rows of a Mamba mixer, whose linear layers never have biases (`mamba_mixer.py`)."""
    prefix = LAYER + "mixer."
    return [
        *(_row(prefix + name, "mamba_heads", COLUMN) for name in ("dt_bias", "A_log", "D")),
        *_norm(prefix + "in_proj.layer_norm_", norm_bias),
        segmented(prefix + "in_proj.weight", "mamba_in hidden", segments=MIXER_IN_PROJ),
        segmented(prefix + "conv1d.weight", "mamba_conv one mamba_kernel", segments=MIXER_CONVOLUTION),
        segmented(prefix + "conv1d.bias", "mamba_conv", segments=MIXER_CONVOLUTION),
        _row(prefix + "norm.weight", "mamba_inner", COLUMN),
        _row(prefix + "out_proj.weight", "hidden mamba_inner", ROW),
    ]


def _latent_attention(args: Mapping[str, Any], norm_bias: bool, bias: bool) -> list[Weight]:
    """Return the rows of latent attention: low-rank projections of queries and of keys and values (`MLASelfAttention`).

    The norm before them is a module of its own. Queries may have one full projection instead.
    """
    prefix, rows = LAYER + "self_attention.", _norm(LAYER + "input_layernorm.", norm_bias)
    steps = [("kv", "kv_down", "kv_rank", "kv_latent")]
    if args.get("q_lora_rank") is None:
        rows.append(_row(prefix + "linear_q_proj.weight", "q_latent hidden", COLUMN))
    else:
        steps.insert(0, ("q", "q_rank", "q_rank", "q_latent"))
    for name, down, rank, up in steps:
        rows.append(_row(prefix + f"linear_{name}_down_proj.weight", f"{down} hidden"))
        if args.get("qk_layernorm"):
            rows += _norm(prefix + f"linear_{name}_up_proj.layer_norm_", norm_bias, rank)
        rows.append(_row(prefix + f"linear_{name}_up_proj.weight", f"{up} {rank}", COLUMN))
    return rows + _linear(prefix + "linear_proj.", "hidden", "v_latent", ROW, bias)


def _experts(args: Mapping[str, Any], norm_bias: bool, bias: bool, up: Shard, up_shape: str) -> list[Weight]:
    rows = _norm(LAYER + "pre_mlp_layernorm.", norm_bias)
    rows.append(_row(LAYER + "mlp.router.weight", "experts hidden"))
    if has_expert_bias(args):
        rows.append(_row(LAYER + "mlp.router.bias", "experts"))
    if args.get("moe_router_enable_expert_bias"):
        rows.append(replace(_row(LAYER + "mlp.router.expert_bias", "experts"), trained=False))
    rows += _linear(EXPERT + "linear_fc1.", up_shape + "moe_ffn", "hidden", up, bias)
    rows += _linear(EXPERT + "linear_fc2.", "hidden", "moe_ffn", ROW, bias)
    if args.get("moe_shared_expert_intermediate_size"):
        shared = LAYER + "mlp.shared_experts."
        rows += _linear(shared + "linear_fc1.", up_shape + "shared_ffn", "hidden", up, False)
        rows += _linear(shared + "linear_fc2.", "hidden", "shared_ffn", ROW, False)
        if args.get("moe_shared_expert_gate"):
            rows.append(_row(shared + "gate_weight", "one hidden"))
    return rows


def _row(name: str, shape: str, shard: Shard = REPLICATED, *, vocab: bool = False) -> Weight:
    return Weight(name, tuple(shape.split()), (), shard, vocab=vocab)


def _norm(prefix: str, bias: bool, shape: str = "hidden") -> list[Weight]:
    return [_row(prefix + "weight", shape), *([_row(prefix + "bias", shape)] if bias else [])]


def _linear(prefix: str, rows: str, columns: str, shard: Shard, bias: bool) -> list[Weight]:
    """Return the rows of a linear layer. The bias is sharded as the weight's rows are: not if it is row-parallel."""
    weight = _row(prefix + "weight", f"{rows} {columns}", shard)
    if not bias:
        return [weight]
    return [weight, _row(prefix + "bias", rows, REPLICATED if shard == ROW else shard)]
