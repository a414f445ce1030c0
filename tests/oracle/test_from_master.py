"""`export --from-master`: the fp32 master copies of a run in place of its weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from mcore_convert import ConvertError, export, reshard
from tests.conftest import real_checkpoint
from tests.tensors import dcp_tensors, hf_tensors


def exported(name: str, out: Path, **options: object) -> dict[str, torch.Tensor]:
    """Return the tensors of an export of a real run without a tokenizer."""
    done = export(real_checkpoint(name), out, with_tokenizer=False, family="llama", **options)  # type: ignore[arg-type]
    assert done.path is not None
    return hf_tensors(done.path)


def test_masters_are_written_bit_for_bit(tmp_path: Path) -> None:
    """Against torch's own reading of the checkpoint; what they round to is the model that is exported without."""
    masters = exported("llama_tp2pp2", tmp_path / "masters", from_master=True)
    stored = dcp_tensors(real_checkpoint("llama_tp2pp2") / "iter_0000010")
    fc2 = stored["optimizer.state.param.decoder.layers.mlp.linear_fc2.weight"]
    norms = stored["optimizer.state.param.decoder.final_layernorm.weight"]
    for layer in range(4):
        assert torch.equal(masters[f"model.layers.{layer}.mlp.down_proj.weight"], fc2[layer])
    assert torch.equal(masters["model.norm.weight"], norms)
    assert {tensor.dtype for tensor in masters.values()} == {torch.float32}
    weights = exported("llama_tp2pp2", tmp_path / "weights")
    assert weights.keys() == masters.keys()
    for name, weight in weights.items():
        assert torch.equal(masters[name].to(weight.dtype), weight), name
        assert weight.numel() < 64 or not torch.equal(masters[name], weight.float()), name
    manifest = json.loads((tmp_path / "masters" / "mcore_convert.json").read_text())
    (key,) = manifest["tensors"]["model.norm.weight"]["from"]
    assert key == "optimizer.state.param.decoder.final_layernorm.weight"
    assert manifest["options"]["from_master"] is True
    assert json.loads((tmp_path / "masters" / "config.json").read_text())["torch_dtype"] == "float32"


@pytest.mark.parametrize("name", ["llama_legacy_tp2pp2", "llama_tp2dp2"])
def test_other_forms_and_another_dtype(name: str, tmp_path: Path) -> None:
    """Rounded again they are the weights; in float16 they keep bits that the weights have lost."""
    weights = exported(name, tmp_path / "weights")
    again = exported(name, tmp_path / "again", from_master=True, dtype="bfloat16")
    assert all(torch.equal(again[key], weight) for key, weight in weights.items())
    halves = exported(name, tmp_path / "halves", from_master=True, dtype="float16")
    assert not torch.equal(halves["lm_head.weight"], weights["lm_head.weight"].half())


def test_without_master_copies(tmp_path: Path) -> None:
    reshard(real_checkpoint("llama_tp2pp2"), tmp_path / "weights", optimizer=False)
    with pytest.raises(ConvertError, match="no master copies"):
        export(tmp_path / "weights", tmp_path / "out", with_tokenizer=False, from_master=True)
    export(tmp_path / "weights", tmp_path / "hf", with_tokenizer=False, family="llama")
    with pytest.raises(ConvertError, match="no use for --from-master"):
        export(tmp_path / "hf", tmp_path / "out", with_tokenizer=False, from_master=True)
