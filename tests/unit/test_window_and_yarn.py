"""Windows that some layers have, and positions that YaRN scales, between `config.json` and Megatron's arguments."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from converters.gpt_oss import CONFIG
from mcore_convert.errors import ConfigError
from mcore_convert.spec.config.arguments import normalise
from mcore_convert.spec.config.bridge import run_config
from mcore_convert.spec.config.command_line import caveats, command_line
from mcore_convert.spec.config.completion import complete
from mcore_convert.spec.config.provider import arguments_of
from tests.kinds import ROOT

S, F = "sliding_attention", "full_attention"
(PUBLISHED,) = (
    entry["config"]
    for entry in json.loads((ROOT / "fixtures/published_configs.json").read_text())
    if entry["name"].startswith("gpt-oss-20b")
)
# What Megatron-Bridge 0.6 sets for it (`gpt_oss_bridge.py`), in the words of Megatron-LM's arguments.
OF_BRIDGE = {
    "normalization": "RMSNorm",
    "swiglu": False,
    "quick_geglu": True,
    "activation_func_clamp_value": 7.0,
    "glu_linear_offset": 1.0,
    "add_bias_linear": True,
    "add_qkv_bias": True,
    "bias_dropout_fusion": False,
    "moe_router_pre_softmax": False,
    "moe_ffn_hidden_size": 2880,
    "softmax_type": "learnable",
    "window_size": [127, 0],
    "window_attn_skip_freq": 2,
    "position_embedding_type": "yarn",
    "rotary_base": 150000,
    "rotary_scaling_factor": 32.0,
    "yarn_original_max_position_embeddings": 4096,
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
    "yarn_correction_range_round_to_int": False,
}


def args_of(**changes: Any) -> dict[str, Any]:
    return normalise(CONFIG.to_megatron({**PUBLISHED, **changes}))


def test_the_published_model_is_what_megatron_bridge_takes_it_for() -> None:
    args = args_of()
    assert {name: args[name] for name in OF_BRIDGE} == OF_BRIDGE


@pytest.mark.parametrize(
    ("kinds", "window", "frequency"),
    [
        (None, 128, 2),
        ([S, F] * 12, 128, 2),
        ([S, S, F] * 8, 128, 3),
        ([F, S] * 12, 128, [0, 1] * 12),
        ([S] * 23 + [F], 128, 24),
        ([S] * 24, 128, None),
        ([F] * 24, None, None),
    ],
)
def test_layers_with_a_window(kinds: list[str] | None, window: int | None, frequency: Any) -> None:
    """Megatron counts layers from 1 and has no window where the number divides that of the layer, or at a 0."""
    args = args_of(layer_types=kinds)
    assert args["window_size"] == (None if window is None else [window - 1, 0])
    assert args["window_attn_skip_freq"] == frequency
    config = CONFIG.to_hf(args)
    assert config["layer_types"] == (kinds or [S, F] * 12)
    assert config["sliding_window"] == window
    line = command_line({**args, "tensor_model_parallel_size": 1})
    if frequency is not None:
        text = str(frequency).replace(" ", "")
        assert line[line.index("--window-attn-skip-freq") + 1] == text


def test_a_window_that_covers_all_positions_is_none() -> None:
    args = args_of(sliding_window=131072)
    assert (args["window_size"], args["window_attn_skip_freq"]) == (None, None)


def test_a_pattern_may_be_an_expression() -> None:
    config = CONFIG.to_hf({**args_of(), "window_attn_skip_freq": "([0]*1+[1]*1)*12"})
    assert config["layer_types"] == [F, S] * 12


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": [S, F]}, "`layer_types` = "),
        ({"layer_types": [S, "chunked_attention"] * 12}, "`layer_types` = "),
        ({"sliding_window": None}, "`sliding_window` = null beside layers of `sliding_attention`"),
        ({"attention_bias": False}, "`attention_bias` = false"),
        ({"swiglu_alpha": 1.0}, "`swiglu_alpha` = 1.0"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "`rope_scaling.rope_type` = llama3"),
        ({"rope_scaling": {**PUBLISHED["rope_scaling"], "attention_factor": 1.2}}, "`rope_scaling.attention_factor`"),
        ({"rope_scaling": {**PUBLISHED["rope_scaling"], "truncate": 1}}, "`rope_scaling.truncate` = 1"),
        ({"rope_scaling": {**PUBLISHED["rope_scaling"], "mscale": 0.7}}, "`rope_scaling.mscale` = 0.7"),
        ({"rope_scaling": {**PUBLISHED["rope_scaling"], "factor": 0.5}}, "`rope_scaling.factor` = 0.5"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_megatron_core_has_not_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        CONFIG.to_megatron({**PUBLISHED, **changes})
    assert any(message in item for item in refused.value.items)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("softmax_type", "vanilla"),
        ("softmax_type", "off-by-one"),
        ("glu_linear_offset", 0.0),
        ("activation_func_clamp_value", None),
        ("quick_geglu", False),
        ("add_bias_linear", False),
        ("window_attn_skip_freq", [1, 0]),
        ("rotary_percent", 0.5),
        ("rotary_interleaved", True),
        ("use_rope_scaling", True),
        ("position_embedding_type", "mrope"),
        ("rotary_scaling_factor", 0.5),
        ("moe_router_enable_expert_bias", True),
    ],
)
def test_another_model_is_not_of_the_family(name: str, value: Any) -> None:
    args = args_of()
    assert CONFIG.refusals(args) == []
    assert [line for line in CONFIG.refusals({**args, name: value}) if f"`{name}`" in line]


def test_positions_that_are_not_scaled_are_reported() -> None:
    """transformers takes a configuration that says nothing for one that YaRN scales by 32."""
    plain = {"rope_type": "default"}
    args = args_of(rope_scaling=plain)
    assert (args["position_embedding_type"], args["rotary_base"]) == ("rope", 150000)
    assert CONFIG.to_hf(args)["rope_scaling"] == plain
    silent = {key: value for key, value in PUBLISHED.items() if not key.startswith("rope_")}
    assert CONFIG.to_megatron(silent) == CONFIG.to_megatron(PUBLISHED)


def test_the_factors_of_yarn_come_back() -> None:
    scaling = {**PUBLISHED["rope_scaling"], "mscale": 0.8, "mscale_all_dim": 0.6, "truncate": True, "beta_fast": 8.0}
    assert CONFIG.to_hf(args_of(rope_scaling=scaling))["rope_scaling"] == scaling


def test_what_megatron_bridge_reads_says_the_same() -> None:
    """Its provider has names of its own, and leaves factors out that `gpt_oss_bridge.py` sets to None."""
    args = complete(CONFIG.to_megatron(PUBLISHED), dtype="bfloat16", tp=1, pp=1, vocab_size=201088)
    model = yaml.safe_load(run_config(args, "gpt_oss"))["model"]
    assert model["yarn_rotary_scaling_factor"] == 32.0
    assert model["activation_func"]["_target_"] == "megatron.core.fusions.fused_bias_geglu.quick_gelu"
    assert (model["gated_linear_unit"], model["bias_dropout_fusion"]) == (True, False)
    for unsaid in ({}, {"yarn_mscale": None, "yarn_mscale_all_dim": None}):
        result = normalise(arguments_of({**model, **unsaid}, "run_config.yaml"))
        assert CONFIG.to_hf({**result, "vocab_size": 201088}) == CONFIG.to_hf(normalise(args))


def test_the_printed_line_says_what_needs_a_young_release() -> None:
    line, notes = command_line(args_of()), caveats(args_of())
    assert "--no-yarn-correction-range-round-to-int" in line
    assert "--no-bias-dropout-fusion" in line
    assert "`position_embedding_type` = yarn: Megatron-LM has its flags since 0.19" in notes
    assert "`softmax_type` = learnable: Megatron-LM has `--softmax-type` since 0.15" in notes
