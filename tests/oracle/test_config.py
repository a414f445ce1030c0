"""Configuration mappings: transformers' own config objects and real Megatron-LM arguments are the oracles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from converters import gpt2, llama, mistral
from mcore_convert.errors import ConfigError
from mcore_convert.spec.config.arguments import normalise
from mcore_convert.spec.config.neutral import NEUTRAL

Config = dict[str, Any]

TINY_LLAMA: Config = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
TINY_GPT2: Config = {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 2}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA31 = {**LLAMA3, "original_max_position_embeddings": 8192}

VARIANTS: dict[str, Config] = {
    "llama": TINY_LLAMA,
    "grouped": {**TINY_LLAMA, "num_key_value_heads": 2},
    "one group": {**TINY_LLAMA, "num_key_value_heads": 1},
    "tied": {**TINY_LLAMA, "tie_word_embeddings": True},
    "head_dim": {**TINY_LLAMA, "head_dim": 32},
    "bias": {**TINY_LLAMA, "attention_bias": True},
    "theta": {**TINY_LLAMA, "rope_theta": 500000},
    "theta in parameters": {**TINY_LLAMA, "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}},
    "llama3": {**TINY_LLAMA, "rope_theta": 500000.0, "rope_scaling": LLAMA31, "max_position_embeddings": 131072},
    "llama3 in parameters": {**TINY_LLAMA, "rope_parameters": {**LLAMA31, "rope_theta": 500000.0}},
    "llama3, factor 32": {**TINY_LLAMA, "rope_scaling": {**LLAMA31, "factor": 32.0}},
    "llama3, length implied": {**TINY_LLAMA, "rope_scaling": LLAMA3, "max_position_embeddings": 8192},
    "linear": {**TINY_LLAMA, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "linear, new word": {**TINY_LLAMA, "rope_scaling": {"rope_type": "linear", "factor": 2}},
    "no scaling": {**TINY_LLAMA, "rope_scaling": None, "pretraining_tp": 2, "use_cache": False},
    "epsilon": {**TINY_LLAMA, "rms_norm_eps": 1e-5, "vocab_size": 128256, "intermediate_size": 176},
    "dtype": {**TINY_LLAMA, "torch_dtype": "bfloat16", "attention_dropout": 0.1},
    "dtype, new word": {**TINY_LLAMA, "dtype": "float16"},
    "gpt2": TINY_GPT2,
    "erf": {**TINY_GPT2, "activation_function": "gelu"},
    "tanh": {**TINY_GPT2, "activation_function": "gelu_pytorch_tanh"},
    "inner": {**TINY_GPT2, "n_inner": 96, "layer_norm_epsilon": 1e-6},
    "untied": {**TINY_GPT2, "tie_word_embeddings": False, "vocab_size": 500, "n_positions": 64},
    "old gpt2": {**TINY_GPT2, "n_ctx": 1024, "summary_type": "cls_index", "task_specific_params": {"a": 1}},
    "dropout": {**TINY_GPT2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.2, "torch_dtype": "float32"},
}
# keys that change no function; `rope_parameters` of linear scaling keeps the old word beside the new one
FREE = {"bos_token_id", "eos_token_id", "transformers_version", "use_cache", "pretraining_tp", "architectures", "n_ctx"}
FREE |= {"task_specific_params", "_name_or_path", "activation_function"}


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_a_round_trip_means_the_same_to_transformers(config: Config, tmp_path: Path) -> None:
    mapping = llama.CONFIG if config["model_type"] == "llama" else gpt2.CONFIG
    args = mapping.to_megatron(config)
    back = mapping.to_hf(normalise(args))
    assert mapping.to_megatron(json.loads(json.dumps(back))) == {"fp16": False, "bf16": False, **args}
    before, after = (_load(each, tmp_path / name) for each, name in ((config, "a"), (back, "b")))
    if before["dtype"] is None:
        after["dtype"] = None
    assert before == after


def _load(config: Config, path: Path) -> Config:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    loaded = AutoConfig.from_pretrained(path).to_dict()
    for rope in (loaded.get("rope_parameters"), loaded.get("rope_scaling")):
        if rope:
            rope.pop("type", None)
            rope.update({key: float(value) for key, value in rope.items() if isinstance(value, int)})
    if loaded["model_type"] == "gpt2" and loaded["activation_function"] != "gelu":
        loaded["activation_function"] = "tanh"
    return {key: value for key, value in loaded.items() if key not in FREE or loaded.get(key) == "tanh"}


def test_a_mistral_whose_window_covers_its_context_is_a_llama() -> None:
    config: Config = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    args = mistral.CONFIG.to_megatron({**config, "max_position_embeddings": 4096})
    assert args["num_query_groups"] == 8
    assert args["ffn_hidden_size"] == 14336
    assert llama.CONFIG.to_hf(normalise(args))["architectures"] == ["LlamaForCausalLM"]


def test_a_window_counts_the_position_itself_in_transformers_and_not_in_megatron() -> None:
    args = mistral.CONFIG.to_megatron({"model_type": "mistral", "max_position_embeddings": 8192})
    assert args["window_size"] == [4095, 0]
    assert mistral.CONFIG.to_hf(normalise(args))["sliding_window"] == 4096
    assert llama.CONFIG.refusals(normalise(args)) == ["`window_size` = [4095, 0]"]


REFUSED: list[tuple[Config, str]] = [
    ({**TINY_LLAMA, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "`rope_scaling.rope_type` = yarn"),
    ({**TINY_LLAMA, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "`rope_scaling.rope_type` = dynamic"),
    ({**TINY_LLAMA, "rope_parameters": {"rope_type": "longrope"}}, "`rope_parameters.rope_type` = longrope"),
    ({**TINY_LLAMA, "rope_scaling": {"type": "linear", "factor": 1.5}}, "`rope_scaling.factor` = 1.5"),
    ({**TINY_LLAMA, "rope_scaling": {"type": "linear", "factor": 2, "x": 1}}, "`rope_scaling.x` = 1 is not known"),
    ({**TINY_LLAMA, "rope_scaling": {"type": "linear", "rope_type": "llama3"}}, "`rope_scaling.type` differ"),
    (
        {**TINY_LLAMA, "rope_scaling": {**LLAMA31, "original_max_position_embeddings": 4096}},
        "`rope_scaling.original_max_position_embeddings` = 4096, Megatron has 8192 built in",
    ),
    ({**TINY_LLAMA, "rope_scaling": {**LLAMA31, "low_freq_factor": 2.0}}, "`rope_scaling.low_freq_factor` = 2.0"),
    ({**TINY_LLAMA, "rope_scaling": {**LLAMA31, "high_freq_factor": 2.0}}, "`rope_scaling.high_freq_factor` = 2.0"),
    ({**TINY_LLAMA, "rope_theta": 10000.5}, "`rope_theta` = 10000.5"),
    ({**TINY_LLAMA, "rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, "`rope_theta` = 10000.0 differ"),
    ({**TINY_LLAMA, "rope_scaling": LLAMA31, "rope_parameters": {"rope_type": "default"}}, "`rope_scaling` differ"),
    ({**TINY_LLAMA, "rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor` = 0.5"),
    ({**TINY_LLAMA, "mlp_bias": True}, "`mlp_bias` = true"),
    ({**TINY_LLAMA, "hidden_act": "gelu"}, '`hidden_act` = "gelu"'),
    (
        {**TINY_LLAMA, "quantization_config": {"bits": 4}},
        '`quantization_config` = {"bits": 4}: its weights are quantised',
    ),
    ({**TINY_LLAMA, "sliding_window": 4096}, "`sliding_window` = 4096"),
    ({**TINY_LLAMA, "nonsense": 4096}, "unknown key `nonsense` = 4096"),
    ({**TINY_LLAMA, "vocab_size": "64"}, '`vocab_size` = "64" is not an int'),
    ({**TINY_LLAMA, "tie_word_embeddings": 1}, "`tie_word_embeddings` = 1 is not a bool"),
    ({**TINY_LLAMA, "num_attention_heads": 3}, "`hidden_size` = 64 is not a multiple of `num_attention_heads` = 3"),
    ({**TINY_LLAMA, "torch_dtype": "float8_e4m3fn"}, "`torch_dtype` = float8_e4m3fn"),
    ({**TINY_LLAMA, "architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
    ({"model_type": "qwen3"}, '`model_type` = "qwen3" is not `llama`'),
    ({**TINY_GPT2, "activation_function": "relu"}, '`activation_function` = "relu"'),
    ({**TINY_GPT2, "scale_attn_by_inverse_layer_idx": True}, "`scale_attn_by_inverse_layer_idx` = true"),
    ({**TINY_GPT2, "scale_attn_weights": False}, "`scale_attn_weights` = false"),
    ({**TINY_GPT2, "add_cross_attention": True}, "`add_cross_attention` = true"),
    ({**TINY_GPT2, "pruned_heads": {"0": [1]}}, "`pruned_heads`"),
    ({**TINY_GPT2, "n_head": 3}, "`n_embd` = 64 is not a multiple of `n_head` = 3"),
]


@pytest.mark.parametrize(("config", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_megatron_cannot_represent_is_refused_by_name(config: Config, message: str) -> None:
    mapping = gpt2.CONFIG if config["model_type"] == "gpt2" else llama.CONFIG
    with pytest.raises(ConfigError) as caught:
        mapping.to_megatron(config)
    assert message in str(caught.value)
    assert len(caught.value.items) <= 1


def test_all_refusals_come_at_once() -> None:
    config = {**TINY_LLAMA, "mlp_bias": True, "hidden_act": "relu", "rope_scaling": {"type": "yarn"}, "nonsense": 1}
    with pytest.raises(ConfigError) as caught:
        llama.CONFIG.to_megatron(config)
    assert len(caught.value.items) == 4


# What real checkpoints store: Megatron-LM 0.16.1 (GPT-2, Llama), 0.19.0 (Llama) and 0.12 (Llama), without the rest.
COMMON: Config = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "kv_channels": 16, "seq_length": 64}
COMMON |= {"max_position_embeddings": 64, "bf16": True, "fp16": False, "attention_dropout": 0.0, "hidden_dropout": 0.0}
COMMON |= {"tokenizer_type": "NullTokenizer", "vocab_size": 499, "padded_vocab_size": 512, "bias_gelu_fusion": False}
COMMON |= {"squared_relu": False, "quick_geglu": False, "qk_layernorm": False, "num_experts": None, "spec": None}
COMMON |= {"window_size": None, "softmax_type": "vanilla", "glu_linear_offset": 0.0, "rotary_percent": 1.0}
COMMON |= {"rotary_base": 10000, "use_rope_scaling": False, "rope_scaling_factor": 8.0, "rope_type": None}
GPT2_0_16 = COMMON | {"normalization": "LayerNorm", "add_bias_linear": True, "add_qkv_bias": True, "swiglu": False}
GPT2_0_16 |= {"position_embedding_type": "learned_absolute", "untie_embeddings_and_output_weights": False}
GPT2_0_16 |= {"group_query_attention": False, "num_query_groups": 4, "ffn_hidden_size": 256, "layernorm_epsilon": 1e-5}
LLAMA_0_16 = COMMON | {"normalization": "RMSNorm", "add_bias_linear": False, "add_qkv_bias": False, "swiglu": True}
LLAMA_0_16 |= {"position_embedding_type": "rope", "untie_embeddings_and_output_weights": True}
LLAMA_0_16 |= {"group_query_attention": True, "num_query_groups": 2, "ffn_hidden_size": 176, "layernorm_epsilon": 1e-6}
LLAMA_0_19 = LLAMA_0_16 | {"null_tokenizer_eod_id": None, "use_mup": False, "mup_embedding_mult": 1.0}
LLAMA_0_12 = {name: value for name, value in LLAMA_0_16.items() if name != "layernorm_epsilon"}
LLAMA_0_12 |= {"norm_epsilon": 1e-6, "apply_layernorm_1p": False, "add_position_embedding": True}


def test_arguments_of_a_real_gpt2_name_the_exact_gelu_and_the_whole_vocabulary() -> None:
    args = normalise(GPT2_0_16)
    config = gpt2.CONFIG.to_hf(args)
    assert config["activation_function"] == "gelu"
    assert config["vocab_size"] == 500
    assert config["n_inner"] is None
    assert config["torch_dtype"] == "bfloat16"
    assert gpt2.CONFIG.to_hf(args | {"bias_gelu_fusion": True})["activation_function"] == "gelu_new"
    assert llama.CONFIG.refusals(args)


@pytest.mark.parametrize(("stored", "vocab"), [(LLAMA_0_16, 500), (LLAMA_0_19, 499), (LLAMA_0_12, 500)])
def test_arguments_of_real_llamas_of_three_versions(stored: Config, vocab: int) -> None:
    args = normalise(stored)
    config = llama.CONFIG.to_hf(args)
    assert config["rms_norm_eps"] == 1e-6
    assert config["vocab_size"] == vocab
    assert config["num_key_value_heads"] == 2
    assert config["intermediate_size"] == 176
    assert config["head_dim"] == 16
    assert config["tie_word_embeddings"] is False
    assert gpt2.CONFIG.refusals(args)


def test_a_vocabulary_that_is_not_stated_is_the_padded_one() -> None:
    args = normalise(LLAMA_0_16 | {"vocab_size": None, "tokenizer_type": "HuggingFaceTokenizer"})
    assert llama.CONFIG.to_hf(args)["vocab_size"] == 512


WRONG = {
    "qk_layernorm": True,
    "qk_l2_norm": True,
    "multi_latent_attention": True,
    "num_experts": 8,
    "layernorm_zero_centered_gamma": True,
    "apply_residual_connection_post_layernorm": True,
    "rotary_percent": 0.5,
    "rotary_interleaved": True,
    "squared_relu": True,
    "quick_geglu": True,
    "window_size": (128, 0),
    "softmax_type": "learnable",
    "attention_output_gate": True,
    "mtp_num_layers": 1,
    "heterogeneous_layers_config_path": "x.json",
    "activation_func_clamp_value": 7.0,
    "glu_linear_offset": 1.0,
    "no_rope_freq": 4,
    "mrope_section": [16, 24, 24],
    "experimental_attention_variant": "dsa",
    "linear_attention_freq": 4,
    "use_mup": True,
    "mup_embedding_mult": 2.0,
    "is_hybrid_model": True,
    "position_embedding_type": "yarn",
    "normalization": "LayerNorm",
    "add_bias_linear": True,
    "use_kitchen": True,
    "spec": ["a.module", "a_spec"],
}


@pytest.mark.parametrize("name", WRONG)
def test_arguments_that_change_the_function_are_refused_by_name(name: str) -> None:
    line, *_ = llama.CONFIG.refusals(normalise(LLAMA_0_16 | {name: WRONG[name]}))
    assert line.startswith(f"`{name}` = {WRONG[name]!r}")


def test_old_names_are_refused_under_the_new_ones() -> None:
    assert llama.CONFIG.refusals(normalise(LLAMA_0_12 | {"apply_layernorm_1p": True})) == [
        "`layernorm_zero_centered_gamma` = True"
    ]


@pytest.mark.parametrize("name", ["hybrid_override_pattern", "hybrid_layer_pattern"])
def test_a_pattern_of_layers_is_refused_under_the_name_of_today(name: str) -> None:
    assert llama.CONFIG.refusals(normalise(LLAMA_0_16 | {name: "M*-"})) == [
        "`is_hybrid_model` = True",
        "`hybrid_layer_pattern` = 'M*-'",
    ]


def test_both_scalings_at_once_are_refused() -> None:
    args = LLAMA_0_16 | {"use_rope_scaling": True, "rotary_seq_len_interpolation_factor": 4}
    assert llama.CONFIG.refusals(normalise(args)) == [
        "`rotary_seq_len_interpolation_factor` = 4 beside `use_rope_scaling`"
    ]


def test_te_activation_is_the_tanh_form_and_refused_where_it_matters() -> None:
    assert gpt2.CONFIG.refusals(normalise(GPT2_0_16 | {"use_te_activation_func": True}))
    assert not llama.CONFIG.refusals(normalise(LLAMA_0_16 | {"use_te_activation_func": True}))


def test_neutral_values_are_neutral_for_both_families() -> None:
    for name, values in NEUTRAL.items():
        if name in {"normalization", "position_embedding_type", "add_bias_linear", "add_qkv_bias", "swiglu"}:
            continue
        for value in values:
            assert not llama.CONFIG.refusals(normalise(LLAMA_0_16 | {name: value})), name
            assert not gpt2.CONFIG.refusals(normalise(GPT2_0_16 | {name: value})), name


ORIGINAL: Config = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-06,
    "vocab_size": 500,
    "torch_dtype": "bfloat16",
    "eos_token_id": 7,
    "initializer_range": 0.01,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
}


def test_an_original_that_says_the_same_is_kept_as_it_is() -> None:
    assert llama.CONFIG.merge(ORIGINAL, normalise(LLAMA_0_16)) == (ORIGINAL, [])


def test_an_original_is_changed_only_where_the_arguments_prove_it_wrong() -> None:
    args = normalise(LLAMA_0_16 | {"rotary_base": 500000, "layernorm_epsilon": 1e-5, "bf16": False})
    config, changes = llama.CONFIG.merge(ORIGINAL, args)
    assert changes == [
        "`rms_norm_eps` 1e-06 -> 1e-05",
        "`rope_theta` (absent) -> 500000.0",
        '`rope_parameters` {"rope_theta": 10000.0, "rope_type": "default"} -> (absent)',
        '`torch_dtype` "bfloat16" -> "float32"',
    ]
    assert config["eos_token_id"] == 7
    assert llama.CONFIG.to_megatron(config)["rotary_base"] == 500000


def test_a_number_that_is_no_number_is_written_anew() -> None:
    """For Python, false is zero; no class of transformers takes one for the other."""
    args = normalise(LLAMA_0_16 | {"attention_dropout": 0.0})
    config, changes = llama.CONFIG.merge({**ORIGINAL, "attention_dropout": False}, args)
    assert changes == ["`attention_dropout` false -> 0.0"]
    assert config["attention_dropout"] is not False


def test_an_original_of_another_spelling_or_dialect_is_kept() -> None:
    original = {**TINY_GPT2, "n_layer": 4, "activation_function": "gelu_fast", "vocab_size": 500, "n_positions": 64}
    original |= {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.3}
    args = normalise(GPT2_0_16 | {"bias_gelu_fusion": True})
    assert gpt2.CONFIG.merge(original, args) == (original, [])
    internlm = {**ORIGINAL, "model_type": "internlm3", "architectures": ["InternLM3ForCausalLM"], "head_dim": 16}
    assert llama.CONFIG.merge(internlm, normalise(LLAMA_0_16)) == (internlm, [])


def test_an_original_with_unknown_keys_or_of_another_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="quantization_config"):
        llama.CONFIG.merge({**ORIGINAL, "quantization_config": {}}, normalise(LLAMA_0_16))
    with pytest.raises(ConfigError, match="gpt2"):
        llama.CONFIG.merge(TINY_GPT2, normalise(LLAMA_0_16))
