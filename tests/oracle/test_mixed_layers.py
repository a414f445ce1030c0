"""Models whose layers are not alike, dense and with experts: read, cut and named as Megatron Core itself does."""

from __future__ import annotations

from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from fixtures.megatron import random_weights, save_torch_dist
from fixtures.mp_rank import Optimizer
from fixtures.optimizer import Form, load_with_optimizer, random_state, save_with_optimizer
from mcore_convert import ConvertError, inspect, reshard, verify
from mcore_convert.formats.mp_rank.directory import open_mp_rank
from mcore_convert.formats.torch_dist.checkpoint import open_torch_dist
from mcore_convert.megatron.checkpoint import load_torch_dist
from mcore_convert.megatron.model import build_stages
from mcore_convert.megatron.parallel import single_process
from mcore_convert.spec import Layout, gpt
from mcore_convert.spec.config import arguments
from mcore_convert.spec.layers import EXPERTS, MLP, expert_layers
from tests.oracle.test_megatron_fixtures import ARGS
from tests.oracle.test_mp_rank import assert_same, dims_of, load, resharded, saved_by_megatron
from tests.oracle.test_torch_dist_optimizer import assert_is, states_in
from tests.ranks import run_ranks
from tests.tensors import dcp_tensors
from tests.wide import matrix

MIXED: dict[str, Any] = {
    **ARGS,
    "padded_vocab_size": 128,
    "num_experts": 2,
    "moe_ffn_hidden_size": 20,
    "moe_router_topk": 1,
    "moe_router_pre_softmax": True,
    "moe_layer_freq": [0, 1, 1, 0],
    "moe_shared_expert_intermediate_size": 12,
}
PATTERNS = {"list": [0, 1, 1, 0], "every second": 2, "the first alone": 4, "a list of ones": [1, 1, 1, 1]}
LAYOUTS = {
    "pp2": Layout(pp=2),
    "vpp2": Layout(pp=2, vpp=2),
    "pp2ep2": Layout(pp=2, ep=2),
    "first1": Layout(pp=2, first_stage_layers=1),
}


@pytest.mark.parametrize(
    ("optimizer", "name"),
    matrix(
        product(("plain", "distributed"), LAYOUTS),
        thin=lambda optimizer, name: optimizer == "distributed" or name == list(LAYOUTS)[-1],
    ),
)
def test_rank_files_are_what_megatron_holds(name: str, optimizer: Optimizer, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    wanted = load(saved_by_megatron(MIXED, tmp_path / "megatron", layout, optimizer, torch.bfloat16))
    whole = saved_by_megatron(MIXED, tmp_path / "whole", Layout(), optimizer, torch.bfloat16)
    actual = load(resharded(open_mp_rank(whole), tmp_path / "there", layout))
    assert sorted(actual) == sorted(wanted)
    assert_same(actual, wanted)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_keys_and_tensors_are_those_that_megatron_writes(pattern: str, tmp_path: Path) -> None:
    args = {**MIXED, "moe_layer_freq": PATTERNS[pattern], "transformer_impl": "local"}
    save_torch_dist(args, random_weights(args), tmp_path / "megatron")
    reshard(tmp_path / "megatron", tmp_path / "ours", iteration=10)
    wanted, actual = (dcp_tensors(tmp_path / name / "iter_0000010") for name in ("megatron", "ours"))
    assert any("layers.3." in key for key in wanted)
    assert sorted(actual) == sorted(wanted)
    assert all(torch.equal(actual[key], tensor) for key, tensor in wanted.items())
    assert verify(tmp_path / "megatron", tmp_path / "ours").equal
    with single_process():  # and with default strictness Megatron loads it, extra states and all
        stages = build_stages(args)
        load_torch_dist(stages, tmp_path / "ours/iter_0000010")


@pytest.mark.parametrize("form", ["plain", pytest.param("fully_reshardable", marks=pytest.mark.wide), "dp_reshardable"])
def test_optimizer_state_is_found_in_every_form(form: Form, tmp_path: Path) -> None:
    state = random_state(MIXED)
    run_ranks(4, partial(save_with_optimizer, MIXED, state, tmp_path / "run", form, pp=2, ep=2))
    assert open_torch_dist(tmp_path / "run").dialect == "per_layer"
    assert_is(states_in(tmp_path / "run"), state)
    reshard(tmp_path / "run", tmp_path / "ours", iteration=10, pp=2)
    loaded = run_ranks(
        2,
        lambda: load_with_optimizer(
            MIXED, state, tmp_path / "ours/iter_0000010", distributed=form != "plain", pp=2, dtype=torch.bfloat16
        ),
    )
    assert [each.differing for each in loaded] == [[], []]


def test_a_layer_has_the_rows_of_its_parts() -> None:
    dims = dims_of(MIXED)
    assert dims.layers_with(MLP) == [0, 3]
    assert dims.layers_with(EXPERTS) == [1, 2]
    names = {(weight.mcore, at.layer) for weight, at in gpt.family(arguments.normalise(MIXED)).instances(dims)}
    for layer in range(4):
        assert (("decoder.layers.{layer}.mlp.router.weight", layer) in names) == (layer in (1, 2))
        assert (("decoder.layers.{layer}.mlp.linear_fc1.weight", layer) in names) == (layer in (0, 3))
        assert ("decoder.layers.{layer}.self_attention.linear_qkv.weight", layer) in names


def test_ranks_hold_the_layers_that_inspect_draws(tmp_path: Path) -> None:
    path = saved_by_megatron(MIXED, tmp_path / "run", Layout(pp=2, first_stage_layers=1), None, torch.bfloat16)
    inspection = inspect(path)
    assert sum(part.nbytes for part in inspection.ranks) == inspection.nbytes
    assert len({part.nbytes for part in inspection.ranks}) == 2


@pytest.mark.parametrize(
    ("frequency", "pattern"),
    [
        (None, [1, 1, 1, 1]),
        (1, [1, 1, 1, 1]),
        (2, [1, 0, 1, 0]),
        (3, [1, 0, 0, 1]),
        ("2", [1, 0, 1, 0]),
        ([0, 1, 1, 1], [0, 1, 1, 1]),
        ("[0]+[1]*3", [0, 1, 1, 1]),
        ("([0]*1+[1]*1)*2", [0, 1, 0, 1]),
    ],
)
def test_every_spelling_of_the_frequency(frequency: Any, pattern: list[int]) -> None:
    assert expert_layers(frequency, 4) == [bool(each) for each in pattern]


@pytest.mark.parametrize(
    "frequency",
    [0, -1, True, 1.5, "", "x", "[1]*3", [1], [0, 1, 2, 1], "__import__('os')", "[0]*999999999", {}, "(" * 999],
)
def test_a_frequency_that_makes_no_sense_is_refused(frequency: Any) -> None:
    with pytest.raises(ConvertError, match="moe_layer_freq"):
        expert_layers(frequency, 4)
