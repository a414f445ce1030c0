"""Latent attention, experts with a bias and layers that predict further tokens, as Megatron Core itself saves and loads
them: in every dialect, at every place of the layers that predict, with optimizer state."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from fixtures.megatron import Dialect, random_weights, save_torch_dist
from fixtures.mp_rank import Optimizer, load_mp_rank, save_mp_rank
from fixtures.optimizer import STEP, Form, Loaded, load_with_optimizer, random_state, save_with_optimizer
from mcore_convert import reshard, verify
from mcore_convert.checkpoints.identify import identify
from mcore_convert.comparison.logits import tensors_of
from tests.oracle.test_megatron_fixtures import ARGS
from tests.ranks import run_ranks
from tests.tensors import assert_same_tensors

LATENT: dict[str, Any] = {
    **ARGS,
    "group_query_attention": False,
    "num_query_groups": 4,
    "multi_latent_attention": True,
    "qk_layernorm": True,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_head_dim": 6,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 5,
    "rope_type": "yarn",
    "rotary_scaling_factor": 4.0,
    "num_experts": 4,
    "num_layers": 2,
    "moe_layer_freq": [0, 1],
    "moe_ffn_hidden_size": 8,
    "moe_shared_expert_intermediate_size": 8,
    "moe_router_topk": 2,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_topk_scaling_factor": 2.5,
    "mtp_num_layers": 1,
    "vocab_size": 31,
    "make_vocab_size_divisible_by": 16,
    "bf16": True,
}
ALIKE = {**LATENT, "moe_layer_freq": 1, "q_lora_rank": None, "mtp_num_layers": 2}
MODELS = {"one dense layer": LATENT, "layers alike": ALIKE}


@pytest.mark.parametrize(
    ("model", "dialect", "names"),
    [
        ("one dense layer", "per_layer", "transformer_engine"),
        ("one dense layer", "singleton", "local"),
        ("layers alike", "stacked", "local"),
    ],
)
def test_what_megatron_saves_is_read(model: str, dialect: Dialect, names: Any, tmp_path: Path) -> None:
    args = MODELS[model]
    weights = random_weights(args)
    save_torch_dist(args, weights, tmp_path, dialect=dialect, moe_norm=names)
    result = identify(tmp_path)
    assert result.checkpoint.tensors.keys()  # named as the dialect does
    assert getattr(result.checkpoint, "dialect", None) == dialect
    assert any(name.startswith("mtp.layers.0.transformer_layer.mlp.experts.") for name in weights)
    assert any(name.endswith("expert_bias") and tensor.any() for name, tensor in weights.items())
    rows = result.dims.vocab_size
    cut = {
        name: tensor[:rows] if tensor.shape[0] == args["padded_vocab_size"] else tensor
        for name, tensor in weights.items()
    }
    assert_same_tensors(dict(tensors_of(result)), cut)


Layout = dict[str, Any]


def count(layout: Layout) -> int:
    return int(layout.get("tp", 1) * layout.get("pp", 1) * layout.get("ep", 1))


@pytest.mark.parametrize(
    ("start", "options", "optimizer"),
    [
        ({"ep": 2}, {"to": "torch", "tp": 2}, "distributed"),
        ({"tp": 2}, {"to": "torch_dist", "pp": 2}, "plain"),
        ({"pp": 2}, {"to": "torch", "ep": 2}, "distributed"),
    ],
    ids=str,
)
def test_rank_files_are_resharded_with_their_optimizer(
    start: Layout, options: Layout, optimizer: Optimizer, tmp_path: Path
) -> None:
    """Megatron Core saves, and loads what becomes of it: strictly, with every state of every parameter."""
    state = random_state(LATENT)
    save = partial(save_mp_rank, LATENT, state, tmp_path / "saved", optimizer=optimizer, dtype=torch.bfloat16, **start)
    run_ranks(count(start), save)
    reshard(tmp_path / "saved", tmp_path / "moved", implementation="local", for_megatron="0.16", **options)
    assert verify(tmp_path / "saved", tmp_path / "moved").equal
    layout = {name: size for name, size in options.items() if name != "to"}
    load = load_mp_rank if options["to"] == "torch" else load_with_optimizer
    args = {**LATENT, "transformer_impl": "local"}
    path = tmp_path / "moved/iter_0000010"
    each = partial(load, args, state, path, distributed=optimizer == "distributed", **layout)
    loaded: list[Loaded] = run_ranks(count(layout), each)
    for result in loaded:
        assert not result.differing
        assert set(result.steps) == {STEP}
    assert sum(result.count for result in loaded) > 100


@pytest.mark.parametrize(
    ("form", "start", "layout"),
    [
        ("plain", {"pp": 2}, {"tp": 2}),
        ("dp_reshardable", {"tp": 2}, {"pp": 2}),
        ("fully_reshardable", {"tp": 2}, {"pp": 2}),
    ],
)  # Megatron Core 0.16 cuts the distributed forms at wrong places where another stage has a copy of the embedding
def test_distributed_checkpoints_are_resharded_with_their_optimizer(
    form: Form, start: Layout, layout: Layout, tmp_path: Path
) -> None:
    state = random_state(LATENT)
    run_ranks(2, partial(save_with_optimizer, LATENT, state, tmp_path / "saved", form, dialect="per_layer", **start))
    moved = {"to": "torch", "implementation": "local", "for_megatron": "0.16", **layout}
    reshard(tmp_path / "saved", tmp_path / "moved", **moved)
    assert verify(tmp_path / "saved", tmp_path / "moved").equal
    load = partial(load_mp_rank, {**LATENT, "transformer_impl": "local"}, state, tmp_path / "moved/iter_0000010")
    for result in run_ranks(2, partial(load, distributed=form != "plain", **layout)):
        assert not result.differing
        assert set(result.steps) == {STEP}
