"""What Megatron Core cannot represent of a model is refused by its name in `config.json`, one line for each."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fixtures.hf import CONFIGS
from mcore_convert.checkpoints.families import families, of_config, unrepresented
from mcore_convert.errors import ConfigError

LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 1e4}
WINDOWS = ["sliding_attention", "full_attention"]

# a tiny configuration, one feature that it does not have, and what names it
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}, "`sliding_window` = 64"),
    ("qwen2", {"layer_types": WINDOWS}, "`layer_types` = "),
    ("qwen2", {"rope_parameters": YARN}, "`rope_parameters.rope_type` = yarn"),
    ("qwen2", {"rope_parameters": None, "rope_scaling": {"type": "mrope"}}, "`rope_scaling.rope_type` = mrope"),
    ("qwen2", {"hidden_act": "gelu"}, '`hidden_act` = "gelu"'),
    ("qwen2", {"use_mrope": True}, "`use_mrope` = true"),
    ("qwen2", {"quantization_config": {"bits": 4}}, '`quantization_config` = {"bits": 4}'),
    ("qwen2", {"dual_chunk_attention_config": {"chunk_size": 4}}, "`dual_chunk_attention_config` = "),
    ("qwen3", {"attention_bias": True}, "`attention_bias` = true"),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}, "`sliding_window` = 64"),
    ("qwen3", {"rope_parameters": {**YARN, "rope_type": "dynamic"}}, "`rope_parameters.rope_type` = dynamic"),
    ("qwen3", {"num_experts": 8}, "`num_experts` = 8"),
    ("qwen3", {"head_dim": "16"}, '`head_dim` = "16" is not an int'),
    ("phi3", {"rope_parameters": LONGROPE}, "`rope_parameters.rope_type` = longrope"),
    ("phi3", {"rope_parameters": None, "rope_scaling": {"type": "su"}}, "`rope_scaling.rope_type` = su"),
    ("phi3", {"rope_parameters": LLAMA3}, "`rope_parameters.rope_type` = llama3"),
    ("phi3", {"hidden_act": "gelu_new"}, '`hidden_act` = "gelu_new"'),
    ("phi3", {"sliding_window": 0}, "`sliding_window` = 0"),
    ("phi3-partial", {"partial_rotary_factor": 0.75}, "`partial_rotary_factor` = 0.75 differ"),
    ("starcoder2", {"use_bias": False}, "`use_bias` = false"),
    ("starcoder2", {"hidden_act": "relu"}, '`hidden_act` = "relu"'),
    ("starcoder2", {"rope_parameters": {"rope_type": "default", "rope_theta": 0.5}}, "`rope_parameters.rope_theta`"),
    ("starcoder2", {"sliding_window": "40"}, "`sliding_window` = "),
    ("smollm3", {"no_rope_layers": [1, 1]}, "`no_rope_layers` = [1, 1]"),
    ("smollm3", {"no_rope_layers": [1, 1, 2, 0]}, "`no_rope_layers` = [1, 1, 2, 0]"),
    ("smollm3", {"mlp_bias": True}, "`mlp_bias` = true"),
    ("smollm3", {"attention_bias": True}, "`attention_bias` = true"),
    ("smollm3-list", {"layer_types": WINDOWS}, "`layer_types` = "),
    ("stablelm", {"use_parallel_residual": True}, "`use_parallel_residual` = true"),
    ("stablelm", {"qk_layernorm": True}, "`qk_layernorm` = true"),
    ("stablelm", {"hidden_size": 60}, "`hidden_size` = 60 is not a multiple"),
    ("gpt_neox", {"use_parallel_residual": True}, "`use_parallel_residual` = true"),
    ("gpt_neox", {"attention_bias": False}, "`attention_bias` = false"),
    ("gpt_neox", {"rotary_pct": 0.25}, "`rotary_pct` = 0.25 differ"),
    ("gpt_neox", {"hidden_act": "gelu_10"}, '`hidden_act` = "gelu_10"'),
    ("gpt_bigcode", {"multi_query": False}, "`multi_query` = false"),
    ("gpt_bigcode", {"scale_attn_weights": False}, "`scale_attn_weights` = false"),
    ("gpt_bigcode", {"add_cross_attention": True}, "`add_cross_attention` = true"),
    ("nemotron", {"mlp_bias": True}, "`mlp_bias` = true"),
    ("nemotron", {"attention_bias": True}, "`attention_bias` = true"),
    ("nemotron", {"hidden_act": "silu"}, '`hidden_act` = "silu"'),
    ("nemotron", {"rope_parameters": {"partial_rotary_factor": 1.5}}, "`rope_parameters.partial_rotary_factor` = 1.5"),
    ("jais2", {"mlp_bias": False}, "`mlp_bias` = false"),
    ("glm", {"hidden_act": "gelu"}, '`hidden_act` = "gelu"'),
    ("ernie4_5", {"use_bias": True}, "`use_bias` = true"),
    ("helium", {"mlp_bias": True}, "`mlp_bias` = true"),
    ("seed_oss", {"attention_out_bias": True}, "`attention_out_bias` = true"),
    ("persimmon", {"qk_layernorm": False}, "`qk_layernorm` = false"),
    ("granite", {"embedding_multiplier": 12.0}, "`embedding_multiplier` = 12.0"),
    ("granite", {"residual_multiplier": 0.22}, "`residual_multiplier` = 0.22"),
    ("granite", {"logits_scaling": 8.0}, "`logits_scaling` = 8.0"),
    ("granite", {"attention_multiplier": 0.015625}, "`attention_multiplier` = 0.015625"),
    ("internlm3", {"bias": True}, "`bias` = true"),
    ("internlm3", {"rope_scaling": {"rope_type": "dynamic", "factor": 6.0}}, "`rope_scaling.rope_type` = dynamic"),
    ("mistral", {"attention_bias": True}, "`attention_bias` = true"),
    ("mistral", {"sliding_window": -1}, "`sliding_window` = -1"),
]


def config_of(name: str, change: dict[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text())
    return {**config, **change}


@pytest.mark.parametrize(("name", "change", "message"), REFUSED, ids=[f"{case[0]}: {case[2]}" for case in REFUSED])
def test_one_feature_is_refused_by_its_name(name: str, change: dict[str, Any], message: str) -> None:
    family = of_config(config_of(name, {}))
    family.config.to_megatron(config_of(name, {}))
    with pytest.raises(ConfigError) as caught:
        family.config.to_megatron(config_of(name, change))
    assert message in str(caught.value)
    assert len(caught.value.items) == 1


def test_an_unknown_key_is_refused_by_every_family() -> None:
    for path in sorted(CONFIGS.glob("*.json")):
        with pytest.raises(ConfigError, match="`new_feature` = true"):
            of_config(config_of(path.stem, {})).config.to_megatron(config_of(path.stem, {"new_feature": True}))


@pytest.mark.parametrize("architecture", unrepresented())
def test_an_architecture_that_megatron_core_has_not_is_refused_with_the_reason(architecture: str) -> None:
    with pytest.raises(ConfigError) as caught:
        of_config({"architectures": [architecture], "model_type": "x"})
    assert caught.value.items == (f"`{architecture}`: {unrepresented()[architecture]}",)


def test_no_family_reads_what_is_listed_as_unrepresented() -> None:
    read = {name for family in families().values() for name in family.architectures}
    assert not read & unrepresented().keys()
