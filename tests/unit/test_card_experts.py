"""The card of a model with experts says how many there are, how many a token takes, and their size."""

from __future__ import annotations

from pathlib import Path

from mcore_convert import convert, export
from tests.conftest import HfMaker


def card_of(name: str, hf_checkpoint: HfMaker, path: Path) -> str:
    convert(hf_checkpoint(name, fill="normal"), path / "mcore", to="torch", tp=2, ep=2, etp=1)
    export(path / "mcore", path / "out")
    return (path / "out/README.md").read_text()


def test_experts_in_some_layers(hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    text = card_of("qwen3_moe-dense-layers", hf_checkpoint, tmp_path)
    assert "| experts | 8 in 3 of 4 layers, of which a token takes 2 |" in text
    assert "| feed-forward size | 96, SwiGLU |" in text
    assert "| feed-forward size of an expert | 32, SwiGLU |" in text
    assert "tp 2, pp 1, ep 2, etp 1" in text


def test_experts_in_every_layer(hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    text = card_of("qwen3_moe", hf_checkpoint, tmp_path)
    assert "| experts | 8 in each layer, of which a token takes 2 |" in text
    assert "| feed-forward size |" not in text  # of no layer


def test_linear_attention_in_some_layers(hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    text = card_of("qwen3_5_moe", hf_checkpoint, tmp_path)
    assert "| linear attention | in 3 of 4 layers, by the gated delta rule |" in text
    assert "| experts | 4 in each layer, of which a token takes 2 |" in text


def test_a_hybrid(hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    text = card_of("nemotron_h", hf_checkpoint, tmp_path)
    assert "| Mamba | in 3 of 8 layers, 8 heads of 12 |\n| attention | in 2 of 8 layers |" in text
    assert "| feed-forward size | 96, squared ReLU, in 2 of 8 layers |" in text
    assert "| experts | 8 in 1 of 8 layers, of which a token takes 2 |" in text
