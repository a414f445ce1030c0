"""Configurations of other programs are read as data: known names alone, within limits, into Megatron-LM's arguments."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from mcore_convert.errors import ConfigError, UnreadableCheckpoint
from mcore_convert.formats.files.yaml_file import MAX_VALUES, read_yaml, yaml_text
from mcore_convert.formats.megatron.recorded import beside
from mcore_convert.spec.config import bridge, recorded
from mcore_convert.spec.config.arguments import DTYPES, normalise
from mcore_convert.spec.config.symbols import KNOWN, OPAQUE, plain_value

PROVIDER = "megatron.bridge.models.gpt_provider.GPTModelProvider"
SILU = {"_target_": "torch.nn.functional.silu", "_call_": False}
GELU = {"_target_": "torch._C._nn.gelu", "_call_": False}
SIZES = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 4, "ffn_hidden_size": 32, "seq_length": 16}


def bridged(**model: Any) -> dict[str, Any]:
    return {"model": {"_target_": PROVIDER, **SIZES, "activation_func": SILU, "gated_linear_unit": True, **model}}


def args_of(**model: Any) -> dict[str, Any]:
    return normalise(recorded.of_bridge(bridged(**model), "run_config.yaml").args)


HOSTILE = {
    "model._target_": bridged(_target_="os.system"),
    "model.activation_func._target_": bridged(activation_func={"_target_": "hostile_module.run", "_call_": True}),
    "model.a._args_[1].b._target_": bridged(a={"_args_": [1, {"b": {"_target_": "builtins.eval", "_args_": ["1"]}}]}),
    "dataset._target_": {**bridged(), "dataset": {"_target_": "subprocess.Popen", "args": "true"}},
    "model._builder_": bridged(_builder_="importlib.import_module"),
    "tokenizer._target_": {**bridged(), "tokenizer": {"_target_": "torch.hub.load"}},
    "model.q._target_": bridged(q={"_target_": "megatron.bridge.utils.import_utils.safe_import"}),
    "model.r._target_": bridged(r={"_target_": ["torch.float32"]}),
    "model.s._target_": bridged(s={"_target_": "megatron.core.x; import os"}),
}


@pytest.mark.parametrize("place", HOSTILE)
def test_unknown_names_are_refused_and_nothing_is_imported(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hostile_module.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "run_config.yaml").write_text(yaml.safe_dump(HOSTILE[place]))
    imported = set(sys.modules)
    around = beside(tmp_path)
    assert around is not None
    with pytest.raises(ConfigError, match="names what is not known") as caught:
        around.read()
    assert [item.partition(": ")[0] for item in caught.value.items] == [place]
    assert not (tmp_path / "ran").exists()
    assert not {name for name in set(sys.modules) - imported if name.startswith(("hostile", "megatron", "torch"))}


@pytest.mark.parametrize(
    "name",
    [
        "megatron.bridge.models.qwen.qwen_provider.Qwen3ModelProvider600M",
        "megatron.core.transformer.enums.AttnBackend",
        "megatron.core.models.gpt.gpt_layer_specs.get_gpt_decoder_block_spec",
        "megatron.bridge.models.qwen.qwen3_bridge.Qwen3Bridge.provider_bridge.<locals>.<lambda>",
        "transformers.generation.configuration_utils.GenerationConfig.from_dict",
        "torch.bfloat16",
        "torch.float8_e4m3fn",
        "torch.nn.init.normal_",
        "torch._C._nn.gelu",
        "signal.Signals",
    ],
)
def test_names_that_the_programs_write_are_known(name: str) -> None:
    recorded.of_bridge({**bridged(), "rng": {"each": {"_target_": name, "_call_": False}}}, "run_config.yaml")


@pytest.mark.parametrize(
    "name",
    [
        "megatron.bridge.models.gemma.gemma2_provider.Gemma2ModelProvider",
        "megatron.core.optimizer.OptimizerConfig",
        None,
    ],
)
def test_models_that_compute_more_than_their_fields_say_are_refused(name: str | None) -> None:
    with pytest.raises(ConfigError, match="not known as one of Megatron Core's GPT models"):
        recorded.of_bridge(
            {"model": {**bridged()["model"], "_target_": name or "megatron.core.x.y"}}, "run_config.yaml"
        )
    with pytest.raises(ConfigError, match="no section `model`"):
        recorded.of_bridge({"model": None}, "run_config.yaml")


@pytest.mark.parametrize(
    ("model", "wanted"),
    [
        ({}, {"swiglu": True}),
        ({"activation_func": "silu"}, {"swiglu": True}),
        (
            {"activation_func": GELU, "gated_linear_unit": False},
            {"swiglu": False, "bias_gelu_fusion": False, "add_bias_linear": True},
        ),
        (
            {"activation_func": GELU, "gated_linear_unit": False, "bias_activation_fusion": True},
            {"swiglu": False, "bias_gelu_fusion": True},
        ),
        (
            {"activation_func": {"_target_": "megatron.core.activations.fast_gelu"}, "gated_linear_unit": False},
            {"swiglu": False, "bias_gelu_fusion": True},
        ),
        (
            {"activation_func": {"_target_": "megatron.core.activations.squared_relu"}, "gated_linear_unit": False},
            {"swiglu": False, "squared_relu": True},
        ),
        ({"num_query_groups": 2}, {"num_query_groups": 2, "group_query_attention": True}),
        ({"num_query_groups": None}, {"num_query_groups": 4, "group_query_attention": False}),
        ({}, {"untie_embeddings_and_output_weights": False}),
        ({"share_embeddings_and_output_weights": False}, {"untie_embeddings_and_output_weights": True}),
        ({"num_moe_experts": 8, "moe_layer_freq": [0, 1]}, {"num_experts": 8, "moe_layer_freq": [0, 1]}),
        ({"rope_scaling": True, "rope_scaling_factor": 32.0}, {"use_rope_scaling": True, "rope_scaling_factor": 32.0}),
        (
            {"scale_factor": 32, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "old_context_len": 8192},
            {"use_rope_scaling": True, "rope_scaling_factor": 32.0},
        ),
        ({"params_dtype": {"_target_": "torch.bfloat16", "_call_": False}}, {"params_dtype": DTYPES["bfloat16"]}),
        ({"window_size": [127, 0]}, {"window_size": [127, 0]}),
        (
            {"transformer_layer_spec": {"_target_": "megatron.bridge.models.gpt_provider.local_layer_spec"}},
            {"transformer_impl": "local"},
        ),
        (
            {},
            {"max_position_embeddings": 16, "layernorm_epsilon": 1e-5, "normalization": "LayerNorm", "kv_channels": 2},
        ),
    ],
)
def test_fields_become_arguments(model: dict[str, Any], wanted: dict[str, Any]) -> None:
    args = args_of(**model)
    assert {name: args.get(name) for name in wanted} == wanted


@pytest.mark.parametrize(
    "model",
    [
        {"activation_func": GELU},  # a gate with gelu, as Gemma has
        {"activation_func": {"_target_": "megatron.core.activations.fast_gelu"}},
        {"activation_func": {"_target_": "torch.nn.functional.relu"}, "gated_linear_unit": False},
        {"gated_linear_unit": False},
        {"scale_factor": 8, "low_freq_factor": 2.0, "high_freq_factor": 4.0, "old_context_len": 8192},
        {"num_layers": None},
    ],
)
def test_what_no_argument_says_is_refused(model: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        args_of(**model)


JUNK: list[Any] = [None, "x", -1, 0, 1.5, [], {}, [{}], True, 10**30, {"_target_": "torch.dtype"}, {1: 2}]


@pytest.mark.parametrize("junk", JUNK, ids=repr)
def test_values_that_make_no_sense_are_refused_or_handed_on(junk: Any) -> None:
    """What of them an argument takes is for those who read arguments to judge, as with stored ones."""
    tree = {
        **bridged(scale_factor=8, low_freq_factor=1.0, high_freq_factor=4.0, old_context_len=8192, bf16=True),
        **{name: {"lr": 1} for name in recorded.SECTIONS},
    }
    for name in tree["model"]:
        with contextlib.suppress(ConfigError):
            recorded.of_bridge({**tree, "model": {**tree["model"], name: junk}}, "run_config.yaml")
        with contextlib.suppress(ConfigError):
            message = recorded.of_verl({**tree["model"], name: junk}, "transformer_config.json")
            recorded.agreed({"num_layers": 2, "layernorm_epsilon": 1e-5, "num_query_groups": 4}, message)
        with contextlib.suppress(ConfigError):
            recorded.of_nemo({"config": {**tree["model"], name: junk}, "optim": junk}, "model.yaml")
    for name in tree:
        with contextlib.suppress(ConfigError):
            recorded.of_bridge({**tree, name: junk}, "run_config.yaml")


def test_the_vocabulary_of_a_null_tokenizer_is_whole() -> None:
    tree = {**bridged(vocab_size=500), "tokenizer": {"tokenizer_type": "NullTokenizer", "vocab_size": 499}}
    assert normalise(recorded.of_bridge(tree, "run_config.yaml").args)["vocab_size"] == 500


def test_sections_become_arguments() -> None:
    tree = {
        **bridged(),
        "optimizer": {"lr": 3e-4, "use_distributed_optimizer": True, "exp_avg_dtype": {"_target_": "torch.bfloat16"}},
        "ddp": {"grad_reduce_in_fp32": True, "bucket_size": 100, "overlap_grad_reduce": True},
        "train": {
            "global_batch_size": 8,
            "train_iters": 10,
            "exit_signal": {"_target_": "signal.Signals", "_args_": [15]},
        },
        "mixed_precision": "bf16_mixed",
        "scheduler": None,
    }
    args = recorded.of_bridge(tree, "run_config.yaml").args
    wanted = {
        "lr": 3e-4,
        "use_distributed_optimizer": True,
        "exp_avg_dtype": DTYPES["bfloat16"],
        "accumulate_allreduce_grads_in_fp32": True,
        "ddp_bucket_size": 100,
        "overlap_grad_reduce": True,
        "global_batch_size": 8,
        "train_iters": 10,
    }
    assert {name: args.get(name) for name in wanted} == wanted
    assert "exit_signal" not in args


def test_two_configurations_of_different_models_are_refused() -> None:
    message = recorded.of_verl(
        {**SIZES, "gated_linear_unit": True, "params_dtype": "torch.bfloat16"}, "transformer_config.json"
    )
    assert message.args["params_dtype"] == DTYPES["bfloat16"]
    config = {"num_layers": 3, "hidden_size": 8, "layernorm_epsilon": 1e-5}
    with pytest.raises(ConfigError, match="different models") as caught:
        recorded.agreed(config, message)
    assert caught.value.items == ("`num_layers` = 2, and 3 in config.json",)
    assert recorded.agreed({**config, "num_layers": 2}, message)["num_attention_heads"] == 4


def test_values_of_unknown_classes_have_no_plain_value() -> None:
    assert plain_value({"_target_": "megatron.core.transformer.enums.AttnBackend", "_args_": [5]}) is OPAQUE
    assert plain_value([1, {"_target_": "torch.dtype", "_call_": True}]) is OPAQUE
    assert plain_value({"a": [1, "x"]}) == {"a": [1, "x"]}
    assert KNOWN.fullmatch("torch.load") is None


BAD_YAML = {
    "python": ("!!python/object/apply:os.system ['true']", "not plain YAML"),
    "tag": ("a: !mine 1", "not plain YAML"),
    "merge": ("a: &a {x: 1}\nb:\n  <<: *a\n", "merge key"),
    "twice": ("a: 1\na: 2\n", "`a` is there twice"),
    "list": ("- 1\n", "not a YAML mapping"),
    "text": ("just words", "not a YAML mapping"),
    "deep": ("a: " + "[" * 500 + "]" * 500, "nested too deeply|not plain YAML"),
    "cycle": ("a: &a [*a]\n", "nested too deeply"),
    "bytes": ("a: \x00", "not plain YAML"),
    "bomb": (
        "a: &a0 [x, x, x, x, x, x, x, x]\n"
        + "".join(f"b{i}: &a{i + 1} [{', '.join([f'*a{i}'] * 8)}]\n" for i in range(9)),
        f"more than {MAX_VALUES:,} values",
    ),
    "large": ("#" * 2**20 + "\na: 1\n", "bytes, and a configuration at most"),
    "dates as keys": ("2024-01-01: 1\n", "is no name"),
}


@pytest.mark.parametrize("kind", BAD_YAML)
def test_yaml_that_is_more_than_data_is_refused(kind: str, tmp_path: Path) -> None:
    text, reason = BAD_YAML[kind]
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(UnreadableCheckpoint, match=reason):
        read_yaml(tmp_path / "x.yaml")


def test_yaml_keeps_what_it_says(tmp_path: Path) -> None:
    content = {"a": {"b": [1, 2.5, None, True, "x"], "c": 1e-05}, "same": [1]}
    (tmp_path / "x.yaml").write_text(yaml_text(content) + "again: &x {y: 1}\nother: *x\nday: 2024-01-01\n")
    wanted = {**content, "again": {"y": 1}, "other": {"y": 1}, "day": "2024-01-01"}
    assert read_yaml(tmp_path / "x.yaml") == wanted
    with pytest.raises(UnreadableCheckpoint):
        read_yaml(tmp_path / "absent.yaml")


@pytest.mark.parametrize(
    "name", ["mamba.mamba_provider.MambaModelProvider", "hybrid.hybrid_provider.HybridModelProvider"]
)
def test_hybrids_of_megatron_bridge_are_read(name: str) -> None:
    """The pattern of the layers says their number; without one all are Mamba mixers."""
    model = {"_target_": f"megatron.bridge.models.{name}", "position_embedding_type": "none", "mtp_num_layers": 0}
    field = "hybrid_layer_pattern" if "hybrid_provider" in name else "hybrid_override_pattern"
    tree = bridged(**model, num_layers=None, **{field: "M-|M*"})
    args = normalise(recorded.of_bridge(tree, "run_config.yaml").args)
    assert (args["num_layers"], args["hybrid_layer_pattern"], args["is_hybrid_model"]) == (4, "M-M*", True)
    moved = {**args, "hybrid_layer_pattern": "M|-M*"}
    assert bridge.rewritten(tree, moved, optimizer=False, random=False)["model"][field] == "M|-M*"
    plain = normalise(recorded.of_bridge(bridged(**model, num_layers=3), "run_config.yaml").args)
    assert plain["hybrid_layer_pattern"] == "MMM"
