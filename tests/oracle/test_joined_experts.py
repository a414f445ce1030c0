"""Optimizer state of experts that Megatron Core joined in one tensor (`GroupedMLP`): refused by name, weights read."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from mcore_convert import reshard, verify
from mcore_convert.errors import MappingError
from tests.conftest import real_checkpoint
from tests.oracle.test_experts import grouped


def test_state_of_joined_experts_is_refused_by_name(tmp_path: Path) -> None:
    source = real_checkpoint("moe_legacy_pp2ep2")
    joined = tmp_path / "joined"
    shutil.copytree(source, joined)
    for file in joined.rglob("model_optim_rng.pt"):
        content = torch.load(file, map_location="cpu", weights_only=False)
        content["model"] = grouped(content["model"])
        torch.save(content, file)
    with pytest.raises(MappingError, match="does not fit") as caught:
        reshard(joined, tmp_path / "out")
    assert any("mlp.experts.weight1 joins experts" in item for item in caught.value.items), str(caught.value)
    assert caught.value.hint is not None
    assert "--no-optimizer" in caught.value.hint
    assert not (tmp_path / "out").exists()
    reshard(joined, tmp_path / "weights", optimizer=False)
    assert verify(source, tmp_path / "weights").equal
