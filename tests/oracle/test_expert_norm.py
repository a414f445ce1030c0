"""Models with experts of Megatron's own layer spec: resharded, and loaded by Megatron Core with default strictness."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fixtures.megatron import random_weights, save_torch_dist
from mcore_convert import reshard
from mcore_convert.megatron.checkpoint import load_torch_dist
from mcore_convert.megatron.model import build_stages
from mcore_convert.megatron.parallel import single_process
from tests.oracle.test_megatron_fixtures import EXPERTS

ARGS: dict[str, Any] = {**EXPERTS, "padded_vocab_size": 128, "transformer_impl": "local"}


def norms_of(path: Path) -> dict[str, Tensor]:
    """Return the norms before the MLPs, as Megatron Core's own model has them after loading."""
    with single_process():
        stages = build_stages(ARGS)
        load_torch_dist(stages, path)
        return {name: each.detach().clone() for name, each in stages[0].named_parameters() if "pre_mlp" in name}


@pytest.mark.parametrize("moe_norm", ["local", "transformer_engine"])
def test_a_run_of_the_local_spec_loads_what_was_resharded(moe_norm: Any, tmp_path: Path) -> None:
    weights = random_weights(ARGS)
    save_torch_dist(ARGS, weights, tmp_path / "run", moe_norm=moe_norm)
    reshard(tmp_path / "run", tmp_path / "out", iteration=3)
    result = norms_of(tmp_path / "out/iter_0000003")
    assert len(result) == ARGS["num_layers"]
    for name, norm in result.items():
        assert torch.equal(norm, weights[name])
