"""Checkpoints as Megatron Core's own `sharded_state_dict` lays them out: their keys, and that they load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp

from fixtures.megatron import METADATA, Dialect, random_weights, save_torch_dist
from mcore_convert.megatron.checkpoint import load_torch_dist
from mcore_convert.megatron.logits import logits
from mcore_convert.megatron.model import build_stages
from mcore_convert.megatron.parallel import model_parallel, single_process
from mcore_convert.megatron.weights import load_weights, parameters_of
from tests.ranks import run_ranks

ARGS: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 16,
    "ffn_hidden_size": 24,
    "num_attention_heads": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "kv_channels": 4,
    "max_position_embeddings": 8,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "swiglu": True,
    "untie_embeddings_and_output_weights": True,
    "padded_vocab_size": 32,
}
TIED = {**ARGS, "untie_embeddings_and_output_weights": False}
EXPERTS = {**ARGS, "num_layers": 2, "num_experts": 2, "moe_router_topk": 1, "moe_router_pre_softmax": True}


def keys_of(path: Path) -> dict[str, list[int]]:
    """Return the tensors of a checkpoint and their global shapes, without extra states."""
    metadata = dcp.FileSystemReader(path / "iter_0000010").read_metadata().state_dict_metadata
    return {key: list(each.size) for key, each in metadata.items() if hasattr(each, "size")}


@pytest.mark.parametrize("dialect", METADATA)
def test_dialects_name_the_same_tensors_differently(dialect: Dialect, tmp_path: Path) -> None:
    save_torch_dist(ARGS, random_weights(ARGS), tmp_path, dialect=dialect)
    fc1 = {key: shape for key, shape in keys_of(tmp_path).items() if "linear_fc1.weight" in key}
    assert (
        fc1
        == {
            "stacked": {"decoder.layers.mlp.linear_fc1.weight": [4, 48, 16]},
            "per_layer": {f"decoder.layers.{layer}.mlp.linear_fc1.weight": [48, 16] for layer in range(4)},
            "singleton": {
                f"decoder.layers.{layer}.mlp.linear_fc1.weight_{half}": [24, 16] for layer in range(4) for half in "wv"
            },
        }[dialect]
    )


def test_the_common_part_stands_where_each_version_puts_it(tmp_path: Path) -> None:
    weights = random_weights(ARGS)
    for common, files in (("common.pt", {"common.pt"}), ("common_state", set()), ("both", {"common.pt"})):
        path = tmp_path / common
        save_torch_dist(ARGS, weights, path, common=common, iteration=10)  # type: ignore[arg-type]
        directory = path / "iter_0000010"
        assert (path / "latest_checkpointed_iteration.txt").read_text() == "10"
        assert {file.name for file in directory.glob("common*")} == files
        backends = json.loads((directory / "metadata.json").read_text())
        assert ("common_backend" in backends) == bool(files)
        stored = dcp.FileSystemReader(directory).read_metadata().state_dict_metadata
        assert ("common_state/shard_0_1" in stored) == (common != "common.pt")
        if common != "common.pt":
            wanted: dict[str, Any] = {"common_state/shard_0_1": None}
            with pytest.warns(UserWarning, match="single process"):
                dcp.load(wanted, checkpoint_id=directory, no_dist=True)
            ((payload,),) = [wanted["common_state/shard_0_1"]]
            assert payload["iteration"] == 10
            assert payload["args"].ffn_hidden_size == 24
            assert payload["checkpoint_version"] == 3.0


def test_wrappers_and_layers_with_experts_spell_keys_their_way(tmp_path: Path) -> None:
    weights = random_weights(EXPERTS)
    assert weights["decoder.layers.1.mlp.experts.experts.1.linear_fc1.weight"].shape == (48, 16)
    save_torch_dist(EXPERTS, weights, tmp_path / "local")
    save_torch_dist(EXPERTS, weights, tmp_path / "te", prefix="module.", moe_norm="transformer_engine")
    local, wrapped = keys_of(tmp_path / "local"), keys_of(tmp_path / "te")
    assert local["decoder.layers.mlp.experts.experts.linear_fc1.weight"] == [2, 2, 48, 16]
    assert "decoder.layers.mlp.linear_fc1.layer_norm_weight" in local
    renamed = {key.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."): shape for key, shape in local.items()}
    assert wrapped == {f"module.{key}": shape for key, shape in renamed.items()}


@pytest.mark.parametrize("dialect", METADATA)
@pytest.mark.parametrize("args", [ARGS, TIED, EXPERTS], ids=["untied", "tied", "experts"])
def test_megatron_core_loads_them(dialect: Dialect, args: dict[str, Any], tmp_path: Path) -> None:
    weights = random_weights(args)
    save_torch_dist(args, weights, tmp_path, dialect=dialect)
    with single_process():
        expected, got = build_stages(args), build_stages(args)
        load_weights(expected[0], weights.items())
        common = load_torch_dist(got, tmp_path / "iter_0000010")
        assert common["iteration"] == 10
        _assert_same(parameters_of(got[0]), parameters_of(expected[0]))


LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "tp2-pp2": (TIED, {"tp": 2, "pp": 2}),
    "pp2-vpp2": (TIED, {"tp": 1, "pp": 2, "vpp": 2}),
    "pp2-ep2": (EXPERTS, {"tp": 1, "pp": 2, "ep": 2}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_any_layout_writes_and_reads_the_same_tensors(name: str, tmp_path: Path) -> None:
    """Written by all ranks and read in one process, then written by one and read by all ranks."""
    args, layout = LAYOUTS[name]
    ranks = layout["tp"] * layout["pp"] * layout.get("ep", 1)
    weights = random_weights(args)
    run_ranks(ranks, lambda: save_torch_dist(args, weights, tmp_path / "many", **layout))  # type: ignore[arg-type]
    save_torch_dist(args, weights, tmp_path / "one")
    assert keys_of(tmp_path / "many") == keys_of(tmp_path / "one")
    tokens = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(1))
    with single_process():
        expected, got = build_stages(args), build_stages(args)
        load_weights(expected[0], weights.items())
        load_torch_dist(got, tmp_path / "many" / "iter_0000010")
        _assert_same(parameters_of(got[0]), parameters_of(expected[0]))
        whole = logits(expected, tokens)

    def loaded(written: str) -> tuple[list[dict[str, Tensor]], Tensor]:
        with model_parallel(**layout):
            stages = build_stages(args)
            load_torch_dist(stages, tmp_path / written / "iter_0000010")
            held = [{key: each.detach().clone() for key, each in parameters_of(stage).items()} for stage in stages]
            return held, logits(stages, tokens)

    for one, many in zip(run_ranks(ranks, loaded, "one"), run_ranks(ranks, loaded, "many"), strict=True):
        for chunk, other in zip(one[0], many[0], strict=True):
            _assert_same(chunk, other)
        for _, computed in (one, many):
            torch.testing.assert_close(computed, whole, rtol=0, atol=1e-5)


def _assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(got[key], tensor), key
