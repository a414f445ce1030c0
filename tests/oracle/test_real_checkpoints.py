"""Checkpoints that Megatron-LM wrote on GPUs become the models that Megatron-LM computed with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_convert import convert, inspect, reshard, verify
from tests.conftest import real_checkpoint

DISTRIBUTED = ["gpt2_tp2pp2", "llama_tp2pp2", "llama_tp2dp2", "m19_llama_tp2pp2"]
TE_NAMES = [
    "transformer_engine_names/v0.12.0_llama_te_torch_dist",
    "transformer_engine_names/v0.16.1_llama_te_torch_dist",
]
LOGITS_TOLERANCE = 5e-6


@pytest.mark.parametrize("name", ["gpt2_tp2pp2", "llama_tp2pp2"])
def test_logits_are_those_that_megatron_recorded(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    source = real_checkpoint(name)
    convert(source, tmp_path / "hf")
    recorded: dict[str, Any] = torch.load(source / "logits.pt", weights_only=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    with torch.no_grad():
        actual = model(recorded["tokens"]).logits
    wanted = recorded["logits"][..., : actual.shape[-1]]
    assert actual.shape[-1] == 500
    assert (actual - wanted).abs().max() < LOGITS_TOLERANCE
    assert wanted.abs().max() > 1  # a trained model, not noise


@pytest.mark.parametrize("name", [*DISTRIBUTED, *TE_NAMES])
def test_there_and_back(name: str, tmp_path: Path) -> None:
    source = real_checkpoint(name)
    convert(source, tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "back", tp=2)
    assert verify(source, tmp_path / "hf").equal
    assert verify(source, tmp_path / "back").equal


@pytest.mark.parametrize("name", ["gpt2_tp2pp2", "m19_llama_tp2pp2"])
def test_megatron_and_transformers_compute_the_same(name: str, tmp_path: Path) -> None:
    source = real_checkpoint(name)
    convert(source, tmp_path / "hf")
    result = verify(source, tmp_path / "hf", logits=True)
    assert result.equal
    assert result.logits is not None
    assert result.logits.difference < LOGITS_TOLERANCE


def test_the_gelu_is_the_one_that_the_run_used(tmp_path: Path) -> None:
    """The run switched fusion off, so its gelu is the exact form; `gelu_new` would be off by 2e-5."""
    convert(real_checkpoint("gpt2_tp2pp2"), tmp_path / "hf")
    assert json.loads((tmp_path / "hf/config.json").read_text())["activation_function"] == "gelu"


@pytest.mark.parametrize(
    ("name", "written_by", "optimizer", "vocab_size"),
    [
        ("llama_tp2pp2", "Megatron Core 0.16 to 0.17", "distributed, fully_reshardable", 500),
        ("llama_tp2dp2", "Megatron Core 0.16 to 0.17", "distributed, dp_reshardable", 500),
        ("m19_llama_tp2pp2", "Megatron Core 0.19", "distributed, fully_reshardable", 499),
        (TE_NAMES[0], "Megatron Core 0.8 to 0.12", "distributed, fully_sharded_model_space", 128),
        (TE_NAMES[1], "Megatron Core 0.16 to 0.17", "distributed, dp_reshardable", 128),
    ],
)
def test_inspect_says_what_they_are(name: str, written_by: str, optimizer: str, vocab_size: int) -> None:
    inspection = inspect(real_checkpoint(name))
    assert (inspection.family, inspection.written_by, inspection.optimizer) == ("llama", written_by, optimizer)
    assert (inspection.vocab_size, inspection.iteration, inspection.dtypes) == (vocab_size, 10, ("bfloat16",))
    assert inspection.layout is not None
    assert inspection.layout["tp"] == 2


def test_a_model_with_experts_is_looked_at() -> None:
    inspection = inspect(real_checkpoint("transformer_engine_names/v0.16.1_moe_te_torch_dist"))
    assert (inspection.family, inspection.refusals) == ("mixtral", ())
    assert any(line.name == "decoder.layers.mlp.experts.experts.linear_fc1.weight" for line in inspection.weights)


def test_latent_attention_computes_the_same_and_comes_back_with_its_optimizer(tmp_path: Path) -> None:
    """Its tokens may take as many groups as experts, so that groups decide nothing and transformers needs none."""
    source = real_checkpoint("dsv3_legacy_ep2")
    assert inspect(source).family == "deepseek_v3"
    convert(source, tmp_path / "hf")
    result = verify(source, tmp_path / "hf", logits=True)
    assert result.equal
    assert result.logits is not None
    assert result.logits.difference < LOGITS_TOLERANCE
    assert json.loads((tmp_path / "hf/config.json").read_text())["n_group"] == 1
    reshard(source, tmp_path / "moved", to="torch_dist", tp=2)
    reshard(tmp_path / "moved", tmp_path / "back", to="torch", ep=2)
    again = verify(source, tmp_path / "back")
    assert again.equal
    assert again.num_weights > 4 * 90  # with the three states of each
