"""Stored arguments: one spelling for all versions, true vocabularies, what we store, and the command line."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from converters import gpt2, llama
from mcore_convert.errors import ConfigError
from mcore_convert.spec.config.arguments import TorchDtype, normalise, padded_vocab_size, true_vocab_size
from mcore_convert.spec.config.bridge import MIXED_LAYERS, run_config
from mcore_convert.spec.config.command_line import caveats, command_line
from mcore_convert.spec.config.completion import complete
from mcore_convert.spec.config.rope import remarks
from mcore_convert.spec.dims import Dims

LLAMA31 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA: dict[str, Any] = llama.CONFIG.to_megatron(
    {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_hidden_layers": 4,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": {**LLAMA31, "original_max_position_embeddings": 8192},
        "attention_bias": True,
        "vocab_size": 500,
    }
)
GPT2: dict[str, Any] = gpt2.CONFIG.to_megatron(
    {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 4, "activation_function": "gelu", "vocab_size": 500}
)


@pytest.mark.parametrize(
    ("stored", "vocab"),
    [
        ({"tokenizer_type": "NullTokenizer", "vocab_size": 499}, 500),  # up to 0.17
        ({"tokenizer_type": "NullTokenizer", "vocab_size": 499, "null_tokenizer_eod_id": None}, 499),  # since 0.18
        ({"tokenizer_type": "NullMultimodalTokenizer", "vocab_size": 499, "null_tokenizer_eod_id": None}, 500),
        ({"tokenizer_type": "HuggingFaceTokenizer", "vocab_size": 500}, 500),
        ({"tokenizer_type": "HuggingFaceTokenizer", "vocab_size": None}, None),
        ({"tokenizer_type": None, "vocab_size": 500}, 500),
        ({}, None),
    ],
)
def test_the_true_vocabulary(stored: dict[str, Any], vocab: int | None) -> None:
    assert true_vocab_size(stored) == vocab
    once = normalise(stored)
    assert once.get("vocab_size") == vocab
    assert normalise(once) == once


@pytest.mark.parametrize(("vocab", "tp", "rows"), [(50257, 1, 50304), (50257, 2, 50432), (128, 2, 256), (256, 2, 256)])
def test_the_padded_vocabulary(vocab: int, tp: int, rows: int) -> None:
    assert padded_vocab_size(vocab, tp) == rows


def test_what_old_versions_leave_open_is_resolved() -> None:
    open_ended = {"hidden_size": 4096, "num_attention_heads": 32, "num_query_groups": 1, "kv_channels": None}
    args = normalise({**open_ended, "norm_epsilon": 1e-6, "apply_layernorm_1p": True, "swiglu": True})
    assert args["num_query_groups"] == 32  # the default 1 of a run without --group-query-attention
    assert args["kv_channels"] == 128
    assert args["ffn_hidden_size"] == 10880  # as Megatron rounds it; not Llama's 11008
    assert args["layernorm_epsilon"] == 1e-6
    assert args["layernorm_zero_centered_gamma"] is True
    assert normalise(open_ended)["ffn_hidden_size"] == 16384
    assert normalise({"use_rotary_position_embeddings": True})["position_embedding_type"] == "rope"
    assert normalise({"disable_bias_linear": True})["add_bias_linear"] is False


@pytest.mark.parametrize("architecture", [LLAMA, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("tokenizer", [None, "a/tokenizer"])
def test_what_is_stored_is_plain_and_normal(architecture: dict[str, Any], tokenizer: str | None) -> None:
    args = complete(architecture, dtype="bfloat16", tp=2, pp=2, vocab_size=500, tokenizer_model=tokenizer)
    assert normalise(args) == args
    assert {name: args[name] for name in architecture} == architecture
    assert true_vocab_size(args) == 500
    assert args["padded_vocab_size"] == 512
    assert args["params_dtype"] == TorchDtype("bfloat16")
    assert args["norm_epsilon"] == args["layernorm_epsilon"]
    assert args["tokenizer_type"] == ("HuggingFaceTokenizer" if tokenizer else None)
    plain = (type(None), bool, int, float, str, list, TorchDtype)
    assert all(isinstance(value, plain) for value in args.values())
    assert [family.FAMILY.name for family in (gpt2, llama) if not family.CONFIG.refusals(args)] == [
        "gpt2" if architecture is GPT2 else "llama"
    ]
    dims = Dims.of(args, vocab_size=500, padded_vocab_size=512)
    assert dims.kv_channels == architecture["kv_channels"]


def test_virtual_stages_and_dtypes() -> None:
    args = complete(LLAMA, dtype="float16", tp=1, pp=2, vpp=2, vocab_size=500, iteration=7)
    assert args["num_layers_per_virtual_pipeline_stage"] == 1
    assert (args["fp16"], args["bf16"], args["iteration"]) == (True, False, 7)
    with pytest.raises(ConfigError, match="int8"):
        complete(LLAMA, dtype="int8", tp=1, pp=1, vocab_size=500)


# What the loaders read with getattr() and no default: check_checkpoint_args of Megatron-LM 0.12 to main, then
# `_transformer_config_from_args` and `_gpt_provider` of Megatron-Bridge's fallback without run_config.yaml.
READ_BY_MEGATRON = "num_layers hidden_size num_attention_heads padded_vocab_size tensor_model_parallel_size"
READ_BY_BRIDGE = """
    multi_latent_attention heterogeneous_layers_config_path no_persist_layer_norm params_dtype
    overlap_p2p_comm num_experts rotary_interleaved decoder_first_pipeline_num_layers
    decoder_last_pipeline_num_layers fp8_param_gather swiglu bias_swiglu_fusion bias_gelu_fusion squared_relu
    init_method_xavier_uniform group_query_attention num_query_groups config_logger_dir cp_comm_type
    is_hybrid_model bf16 fp16 fp16_lm_cross_entropy hybrid_layer_pattern hybrid_override_pattern
    init_model_with_meta_device max_position_embeddings moe_grouped_gemm mtp_num_layers
    mtp_hybrid_override_pattern normalization position_embedding_type qk_l2_norm qk_layernorm rotary_base
    rotary_percent spec transformer_impl untie_embeddings_and_output_weights use_legacy_models
    use_rope_scaling make_vocab_size_divisible_by
"""


@pytest.mark.parametrize("name", (READ_BY_MEGATRON + READ_BY_BRIDGE).split())
def test_every_attribute_that_a_loader_reads_is_stored(name: str) -> None:
    assert name in complete(LLAMA, dtype="bfloat16", tp=2, pp=2, vocab_size=500)


def test_the_command_line_says_what_no_checkpoint_carries() -> None:
    line = command_line(complete(LLAMA, dtype="bfloat16", tp=2, pp=2, vocab_size=500, tokenizer_model="a/tokenizer"))
    text = " ".join(line)
    assert "--norm-epsilon 1e-06" in text
    assert "--rotary-base 500000 --use-rope-scaling --rope-scaling-factor 32.0" in text
    assert "--group-query-attention --num-query-groups 2" in text
    assert "--kv-channels 32" in text
    assert "--disable-bias-linear" in line
    assert "--add-qkv-bias" in line
    assert "--no-bias-gelu-fusion" not in line
    assert line[-4:] == ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "a/tokenizer"]


def test_a_scaling_factor_that_megatron_lm_does_not_hand_on_is_reported() -> None:
    [line] = caveats(LLAMA)
    assert line.startswith("`rope_scaling_factor` = 32.0")
    assert not caveats(LLAMA | {"rope_scaling_factor": 8.0})
    [line] = caveats(LLAMA | {"use_rope_scaling": False, "rotary_seq_len_interpolation_factor": 4})
    assert line.startswith("`rotary_seq_len_interpolation_factor` = 4")
    assert not caveats(GPT2)
    of_megatron_lm = normalise(LLAMA | {"dist_ckpt_strictness": "log_all"})
    [line] = remarks(of_megatron_lm)
    assert line.startswith("`rope_scaling_factor` = 32.0 is what config.json says")
    assert line.endswith("scaled by 8.0")
    assert not remarks(of_megatron_lm | {"rope_scaling_factor": 8.0})
    assert not remarks(normalise(LLAMA))  # of another program, which may hand it on


def test_the_command_line_of_an_exact_gelu() -> None:
    line = command_line(complete(GPT2, dtype="float32", tp=1, pp=1, vocab_size=500))
    assert "--no-bias-gelu-fusion" in line
    assert "--add-qkv-bias" not in line
    assert not {"--bf16", "--fp16", "--swiglu", "--rotary-base"} & set(line)


@given(vocab=st.integers(2, 5000), tp=st.sampled_from([1, 2, 4]))
def test_a_null_tokenizer_of_any_version_pads_to_the_rows_of_the_checkpoint(vocab: int, tp: int) -> None:
    line = command_line(complete(LLAMA, dtype="float32", tp=tp, pp=1, vocab_size=vocab))
    given_size = int(line[line.index("--vocab-size") + 1])
    for size in (given_size, given_size + 1):  # since 0.18, and up to 0.17
        assert padded_vocab_size(size, tp) == padded_vocab_size(vocab, tp)


@pytest.mark.parametrize(("architecture", "family"), [(LLAMA, "llama"), (GPT2, "gpt2")])
def test_the_run_config_is_yaml_that_says_the_same(architecture: dict[str, Any], family: str) -> None:
    args = complete(architecture, dtype="bfloat16", tp=2, pp=2, vocab_size=500)
    config = yaml.safe_load(run_config(args, family))
    model = config["model"]
    assert model["_target_"] == "megatron.bridge.models.gpt_provider.GPTModelProvider"
    assert model["layernorm_epsilon"] == architecture["layernorm_epsilon"]
    assert model["kv_channels"] == architecture["kv_channels"]
    assert model["vocab_size"] == 500
    assert model["gated_linear_unit"] == architecture["swiglu"]
    assert model["activation_func"]["_call_"] is False
    assert model["bias_activation_fusion"] == (family == "llama")
    assert model["rope_scaling"] == (family == "llama")
    assert model["params_dtype"] == {"_target_": "torch.bfloat16", "_call_": False}
    assert config["checkpoint"] == {"save_optim": False, "save_rng": False, "fully_parallel_save": False}


def test_the_run_config_says_what_the_model_computes() -> None:
    plain = complete(LLAMA, dtype="float32", tp=1, pp=1, vocab_size=500)
    model = yaml.safe_load(run_config(plain, "llama"))["model"]
    assert not {"window_size", "no_rope_freq"} & model.keys()
    other = {"swiglu": False, "squared_relu": True, "qk_layernorm": True, "window_size": [7, 0], "no_rope_freq": 4}
    model = yaml.safe_load(run_config({**plain, **other}, "other"))["model"]
    assert model["activation_func"]["_target_"] == "megatron.core.activations.squared_relu"
    assert model["bias_activation_fusion"] is False  # TransformerConfig refuses it beside a squared ReLU
    assert {name: model[name] for name in ("qk_layernorm", "window_size", "no_rope_freq")} == {
        name: other[name] for name in ("qk_layernorm", "window_size", "no_rope_freq")
    }


def test_the_run_config_of_linear_attention_names_what_makes_its_layers() -> None:
    plain = complete(LLAMA, dtype="float32", tp=1, pp=1, vocab_size=300)
    mixed = {"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": [1, 0]}
    model = yaml.safe_load(run_config({**plain, **mixed, "attention_output_gate": True}, "qwen3_next"))["model"]
    assert model["linear_attention_freq"] == [1, 0]
    assert model["linear_num_value_heads"] == 32
    assert model["attention_output_gate"] is True
    assert model["transformer_layer_spec"] == {"_target_": MIXED_LAYERS, "_call_": False}
    assert "transformer_layer_spec" not in yaml.safe_load(run_config(plain, "llama"))["model"]


def test_the_run_config_of_a_model_with_experts_is_not_that_of_a_dense_one() -> None:
    plain = complete(LLAMA, dtype="float32", tp=1, pp=1, vocab_size=500)
    experts = {
        "num_experts": 8,
        "moe_layer_freq": [0, 1, 1, 1],
        "moe_ffn_hidden_size": 48,
        "moe_router_topk": 2,
        "moe_router_pre_softmax": True,
        "moe_shared_expert_intermediate_size": 64,
        "moe_shared_expert_gate": True,
    }
    dense = yaml.safe_load(run_config(plain, "llama"))["model"]
    assert not any("moe" in name or "expert" in name for name in dense)
    model = yaml.safe_load(run_config({**plain, **experts}, "qwen2_moe"))["model"]
    assert model["num_moe_experts"] == experts.pop("num_experts")
    assert {name: model[name] for name in experts} == experts
