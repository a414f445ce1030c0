"""Directories as other programs and versions write them: what transformers computes when it loads one,
Megatron Core computes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from fixtures.families import FAMILY_OF
from fixtures.hf import CONFIGS
from mcore_convert import convert, verify
from mcore_convert.checkpoints.families import families
from mcore_convert.checkpoints.identify import identify
from mcore_convert.errors import ConfigError
from mcore_convert.spec.config.arguments import normalise
from tests.conftest import HfMaker

S, F = "sliding_attention", "full_attention"
THETA = {"rope_theta": 10000.0}
# A tiny model, and what `config.json` says; None takes a key away. Mistral with `layer_types` is a Ministral to
# transformers, whose class needs `head_dim`.
WRITTEN: dict[str, tuple[str, dict[str, Any]]] = {
    "a window of no layer": ("mistral", {"head_dim": 8, "sliding_window": 5, "layer_types": [F, F]}),
    "a window of all layers": ("mistral", {"head_dim": 8, "sliding_window": 5, "layer_types": [S, S]}),
    "layer types of a class without them": ("mixtral", {"sliding_window": 5, "layer_types": [F, F]}),
    "an empty scaling beside none": ("gpt_oss", {"rope_parameters": None, "rope_scaling": {}, **THETA}),
    "empty parameters": ("gpt_oss", {"rope_parameters": {}, **THETA}),
    "both empty": ("gpt_oss", {"rope_parameters": {}, "rope_scaling": {}, **THETA}),
}


def rewritten(source: Path, path: Path, changes: Mapping[str, Any]) -> Path:
    """Return a directory with the weights of another, and another configuration."""
    path.mkdir()
    (path / "model.safetensors").symlink_to(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text()) | changes
    kept = {key: value for key, value in config.items() if key not in changes or value is not None}
    (path / "config.json").write_text(json.dumps(kept))
    return path


@pytest.mark.parametrize(("name", "changes"), WRITTEN.values(), ids=WRITTEN)
def test_megatron_computes_what_transformers_does(
    name: str, changes: dict[str, Any], hf_checkpoint: HfMaker, tmp_path: Path
) -> None:
    source = rewritten(hf_checkpoint(name, fill="normal"), tmp_path / "source", changes)
    convert(source, tmp_path / "megatron")
    report = verify(source, tmp_path / "megatron", logits=True)
    assert report.equal, report
    convert(tmp_path / "megatron", tmp_path / "back")
    assert verify(source, tmp_path / "back", logits=True).equal


def test_windows_of_some_layers_of_a_mistral_are_refused(hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    changes = {"sliding_window": 5, "layer_types": [F, S]}
    source = rewritten(hf_checkpoint("mistral", fill="normal"), tmp_path / "source", changes)
    with pytest.raises(ConfigError, match="layer_types"):
        identify(source)


def test_a_factor_that_megatron_takes_for_another_is_refused() -> None:
    config = {**AutoConfig.for_model("deepseek_v3").to_dict(), "routed_scaling_factor": 0.0}
    with pytest.raises(ConfigError, match="which Megatron takes for 1"):
        families()["deepseek_v3"].config.to_megatron(config)


@pytest.mark.parametrize("name", sorted(FAMILY_OF))
def test_a_configuration_made_of_arguments_alone_names_no_padding(name: str) -> None:
    """The class default of transformers is that of one tokenizer, and no model with fewer tokens is built with it."""
    mapping = families()[FAMILY_OF[name]].config
    config = mapping.to_hf(normalise(mapping.to_megatron(json.loads((CONFIGS / f"{name}.json").read_text()))))
    model_type = config.pop("model_type")
    loaded = AutoConfig.for_model(model_type, **config)
    assert loaded.pad_token_id is None


def test_an_adapter_beside_a_model_is_told(hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    """transformers with peft installed adds it to the weights (`auto_factory.py`)."""
    source = rewritten(hf_checkpoint("llama-gqa"), tmp_path / "source", {})
    (source / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    report = convert(source, tmp_path / "megatron")
    assert any("adapter_config.json" in note for note in report.notes)


@pytest.mark.parametrize("name", ["llama-gqa", "deepseek_v2"])
def test_no_cache_keeps_a_group(name: str, hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    """A gloo group that is freed in a process forked later waits there for threads that it does not have."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

    source = hf_checkpoint(name, fill="normal")
    convert(source, tmp_path / "megatron")
    assert verify(source, tmp_path / "megatron", logits=True).equal
    assert [kind.forward.cache_info().currsize for kind in (RotaryEmbedding, YarnRotaryEmbedding)] == [0, 0]
