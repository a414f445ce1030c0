"""Finding the family of a checkpoint."""

from __future__ import annotations

from dataclasses import replace

import pytest

from converters import llama
from mcore_convert import families
from mcore_convert.spec import Family
from mcore_convert.spec.arguments import normalise


def twin_of_llama() -> Family:
    """Another family that Megatron cannot tell from Llama."""
    config = replace(llama.CONFIG, model_type="yllama", architectures=("YLlamaForCausalLM",), dialects=())
    return replace(llama.FAMILY, name="yllama", architectures=("YLlamaForCausalLM",), config=config)


def test_the_original_configuration_decides_between_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    both = {"llama": llama.FAMILY, "yllama": twin_of_llama()}
    monkeypatch.setattr(families, "families", lambda: both)
    args = normalise(llama.CONFIG.to_megatron({"model_type": "llama", "vocab_size": 7}))
    assert families.of_arguments(args).name == "llama"
    for architecture, name in {"YLlamaForCausalLM": "yllama", "LlamaForCausalLM": "llama", "Other": "llama"}.items():
        assert families.of_arguments(args, {"architectures": [architecture]}).name == name
