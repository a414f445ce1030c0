"""Megatron Core 0.16 can save `fully_reshardable` state at shifted places: it is refused, not carried along."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mcore_convert import ConvertError, reshard
from mcore_convert.formats.torch_dist.checkpoint import open_torch_dist
from tests.conftest import real_checkpoint


def test_a_master_copy_that_is_not_its_weight_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(real_checkpoint("llama_tp2pp2"), run)
    directory = open_torch_dist(run).directory
    key = "optimizer.state.param.decoder.layers.mlp.linear_fc2.weight"
    view = directory.slots(key)[0].view
    view.path.parent.chmod(0o755)
    view.path.chmod(0o644)
    content = bytearray(view.path.read_bytes())
    start, row = view.offset, view.strides[-2]
    content[start : start + row], content[start + row : start + 2 * row] = (
        content[start + row : start + 2 * row],
        content[start : start + row],
    )
    view.path.write_bytes(content)
    with pytest.raises(ConvertError, match="does not round to the weight"):
        reshard(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    reshard(run, tmp_path / "out", optimizer=False)  # the weights themselves are whole
