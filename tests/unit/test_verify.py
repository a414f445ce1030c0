"""`verify` finds what differs, says where and by how much, and does not mind what means the same."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mcore_convert import ConvertError, convert, verify
from tests.conftest import HfMaker

Change = Callable[[dict[str, torch.Tensor]], None]


def changed(source: Path, target: Path, change: Change) -> Path:
    """Return a copy of a directory with other weights."""
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


def test_one_bit_is_found(hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    source = hf_checkpoint("llama-gqa", fill="normal")
    convert(source, tmp_path / "dist", tp=2)

    def flip(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.self_attn.k_proj.weight"].view(torch.int32)[3, 5] ^= 1

    result = verify(changed(source, tmp_path / "other", flip), tmp_path / "dist")
    assert not result.equal
    (difference,) = result.differences
    assert difference.name == "decoder.layers.1.self_attention.linear_qkv.weight"
    assert difference.num_elements == 1
    assert 0 < difference.largest < 1e-6


def test_size_of_a_difference(hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    source = hf_checkpoint("gpt2", fill="normal", dtype="bfloat16")

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["transformer.h.0.mlp.c_fc.weight"][2, :7] += 4.0

    result = verify(changed(source, tmp_path / "other", add), source)
    (difference,) = result.differences
    assert (difference.num_elements, difference.dtypes) == (7, ("bfloat16", "bfloat16"))
    assert difference.largest == pytest.approx(4.0, rel=0.01)


def test_nan_is_a_difference_of_its_own(hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    source = hf_checkpoint("gpt2", fill="normal")

    def poison(tensors: dict[str, torch.Tensor]) -> None:
        tensors["transformer.ln_f.weight"][0] = float("nan")

    (difference,) = verify(changed(source, tmp_path / "other", poison), source).differences
    assert str(difference.largest) == "nan"


def test_another_dtype_is_a_difference(hf_checkpoint: HfMaker) -> None:
    result = verify(hf_checkpoint("gpt2"), hf_checkpoint("gpt2", dtype="bfloat16"))
    assert not result.equal
    assert len(result.differences) == result.num_weights
    assert {difference.dtypes for difference in result.differences} == {("float32", "bfloat16")}


def test_a_configuration_that_means_something_else(hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    source = hf_checkpoint("llama-gqa")
    shutil.copytree(source, tmp_path / "other")
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "other/config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.25}))
    result = verify(source, tmp_path / "other")
    assert not result.differences
    assert not result.equal
    assert result.config_differences == (f"`rms_norm_eps` is {config['rms_norm_eps']} and 0.25",)


def test_models_of_other_sizes_are_not_compared(hf_checkpoint: HfMaker) -> None:
    with pytest.raises(ConvertError, match="the models have different sizes") as caught:
        verify(hf_checkpoint("llama-gqa"), hf_checkpoint("llama-mha"))
    assert "num_query_groups: 4 and 8" in caught.value.items
    with pytest.raises(ConvertError, match="a `llama` cannot be compared with a `gpt2`"):
        verify(hf_checkpoint("llama-gqa"), hf_checkpoint("gpt2"))


@pytest.mark.parametrize("name", ["gpt2", "llama-attention-bias", "llama3-rope"])
@pytest.mark.oracle
def test_logits_of_both_sides(name: str, hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    source = hf_checkpoint(name, fill="normal")
    convert(source, tmp_path / "dist")
    result = verify(source, tmp_path / "dist", logits=True)
    assert result.logits is not None
    assert result.logits.difference < 2e-5
    assert result.equal


def test_logits_that_differ(hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    """An epsilon of another size changes no weight: only running the models shows what it does."""
    source = hf_checkpoint("llama-gqa", fill="normal")
    shutil.copytree(source, tmp_path / "other")
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "other/config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.25}))
    convert(tmp_path / "other", tmp_path / "dist")
    result = verify(source, tmp_path / "dist", logits=True)
    assert result.logits is not None
    assert not result.logits.within
    assert not result.differences
