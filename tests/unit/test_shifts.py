"""Norms that Megatron stores less one: exact both ways, or refused."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from converters import llama
from mcore_convert import convert, diff, export, verify
from mcore_convert.checkpoints import families
from mcore_convert.errors import ConvertError
from tests.conftest import HfMaker
from tests.tensors import assert_same_tensors, dcp_tensors, hf_tensors

NORM = "decoder.final_layernorm.weight"


@pytest.fixture(autouse=True)
def _centred(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Llama whose norm at the end Megatron stores around zero."""
    rows = tuple(replace(row, less=1.0) if row.mcore == NORM else row for row in llama.FAMILY.weights)
    monkeypatch.setattr(families, "families", lambda: {"llama": replace(llama.FAMILY, weights=rows)})


def with_norm(source: Path, path: Path, values: torch.Tensor) -> Path:
    """Return the model with these numbers in its norm at the end, again and again."""
    shutil.copytree(source, path)
    tensors = load_file(path / "model.safetensors")
    tensors["model.norm.weight"] = values.repeat(64)[:64].to(torch.bfloat16)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.fixture
def source(hf_checkpoint: HfMaker) -> Path:
    return hf_checkpoint("llama-gqa", dtype="bfloat16", fill="normal")


def test_a_norm_is_stored_less_one_and_comes_back(source: Path, tmp_path: Path) -> None:
    """All numbers of bfloat16 between a half and two are."""
    values = torch.arange(0x3F00, 0x4001, 4, dtype=torch.int16).view(torch.bfloat16)
    source = with_norm(source, tmp_path / "source", values)
    wanted = load_file(source / "model.safetensors")["model.norm.weight"]
    convert(source, tmp_path / "dist", tp=2)
    stored = dcp_tensors(tmp_path / "dist/release")[NORM]
    assert torch.equal(stored.double(), wanted.double() - 1)
    export(tmp_path / "dist", tmp_path / "back", with_tokenizer=False)  # with its proof
    assert_same_tensors(hf_tensors(tmp_path / "back"), hf_tensors(source))
    convert(source, tmp_path / "copy", to="hf")
    assert_same_tensors(hf_tensors(tmp_path / "copy"), hf_tensors(source))
    assert verify(source, tmp_path / "dist").equal
    assert not any(change.num_changed for change in diff(tmp_path / "dist", source).changes)


def test_a_cast_rounds_the_sum(hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    source = hf_checkpoint("llama-gqa", fill="normal")
    convert(source, tmp_path / "dist")
    export(tmp_path / "dist", tmp_path / "back", with_tokenizer=False, dtype="bfloat16")
    written = load_file(tmp_path / "back/model.safetensors")["model.norm.weight"]
    stored = dcp_tensors(tmp_path / "dist/release")[NORM]
    assert torch.equal(written, (stored.double() + 1).float().bfloat16())


@pytest.mark.parametrize(("value", "lost"), [(0.0123, 64), (-0.30078125, 64)])
def test_a_norm_that_needs_more_bits_is_refused(value: float, lost: int, source: Path, tmp_path: Path) -> None:
    source = with_norm(source, tmp_path / "source", torch.tensor([value]))
    with pytest.raises(ConvertError, match=f"with -1 added: {lost} of 64 numbers need more bits than bfloat16 has"):
        convert(source, tmp_path / "dist")
    assert not (tmp_path / "dist").exists()
