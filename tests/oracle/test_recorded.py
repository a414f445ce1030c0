"""Checkpoints of programs that store no arguments give what those of Megatron-LM give."""

from __future__ import annotations

import json
import pickle
import shutil
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from mcore_convert import convert, diff, inspect, reshard, verify
from mcore_convert.errors import ConfigError
from mcore_convert.formats.torch_dist.checkpoint import open_torch_dist
from tests.conftest import real_checkpoint
from tests.oracle.test_torch_dist_optimizer import states_in
from tests.recorders import (
    LLAMA,
    LLAMA_GPT,
    model_yaml,
    run_config,
    transformer_config,
    without_arguments,
    write_yaml,
)

CORE = {**LLAMA, "tensor_model_parallel_size": 2}
DENSE = "llama_tp2dp2"  # whose optimizer's state is found by the arguments alone


def plain(name: str) -> Path:
    return next(real_checkpoint(name).glob("iter_*"))


def as_bridge(source: Path, root: Path, config: dict[str, Any] | None = None) -> Path:
    """Return a run's directory as Megatron-Bridge and NeMo-RL leave it."""
    target = root / "iter_0000010"
    without_arguments(source, target)
    gpt = {**LLAMA_GPT, "vocab_size": 500, "should_pad_vocab": True}
    write_yaml(target / "run_config.yaml", config or run_config(CORE, gpt))
    state = {"step": torch.tensor(10, dtype=torch.int32), "consumed_train_samples": torch.tensor(80, dtype=torch.int32)}
    torch.save(state | {"floating_point_operations_so_far": torch.tensor(1.5e9)}, target / "train_state.pt")
    shutil.copy(target / "train_state.pt", root / "latest_train_state.pt")
    (root / "latest_checkpointed_iteration.txt").write_text("10")
    return root


def of_bridge(source: Path, config: Path, root: Path) -> list[Path]:
    return [as_bridge(source, root), root / "iter_0000010"]


def of_nemo_rl(source: Path, config: Path, root: Path) -> list[Path]:
    as_bridge(source, root / "step_7/policy/weights")
    return [root / "step_7", root / "step_7/policy/weights"]


def of_verl(source: Path, config: Path, root: Path) -> list[Path]:
    role = root / "global_step_10/actor"
    (role / "huggingface").mkdir(parents=True)
    shutil.copy(config, role / "huggingface/config.json")
    as_of_verl(source, role / "dist_ckpt")
    (role / "transformer_config.json").write_text(transformer_config(CORE))
    (root / "latest_checkpointed_iteration.txt").write_text("10")
    return [root, root / "global_step_10", role, role / "dist_ckpt"]


def of_verl_in_parts(source: Path, config: Path, root: Path) -> list[Path]:
    """As verl 0.8 and later: its optimizer in a directory beside the model's."""
    role = root / "global_step_10/actor"
    (role / "model/huggingface").mkdir(parents=True)
    shutil.copy(config, role / "model/huggingface/config.json")
    (role / "transformer_config.json").write_text(transformer_config(CORE))
    as_of_verl(source, role / "optimizer/dist_ckpt")
    as_of_verl(source, role / "model/dist_ckpt")
    state = torch.load(role / "model/dist_ckpt/common.pt", weights_only=False)
    del state["optimizer"], state["lr_scheduler"]
    torch.save(state, role / "model/dist_ckpt/common.pt")
    only(role / "model/dist_ckpt", lambda key: not key.startswith("optimizer."))
    only(role / "optimizer/dist_ckpt", lambda key: key.startswith("optimizer."))
    (root / "latest_checkpointed_iteration.txt").write_text("10")
    return [root, role]


def as_of_verl(source: Path, target: Path) -> None:
    """Store the state as verl does: the scheduler under another name, and no iteration."""
    without_arguments(source, target)
    state = torch.load(target / "common.pt", weights_only=False)
    state["lr_scheduler"] = state.pop("opt_param_scheduler")
    del state["iteration"], state["checkpoint_version"]
    torch.save(state, target / "common.pt")


def only(path: Path, holds: Callable[[str], bool]) -> None:
    """Take the keys that do not belong there out of a directory's metadata."""
    metadata = pickle.loads((path / ".metadata").read_bytes())
    metadata.state_dict_metadata = {key: each for key, each in metadata.state_dict_metadata.items() if holds(key)}
    metadata.storage_data = {index: each for index, each in metadata.storage_data.items() if holds(index.fqn)}
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def of_nemo(source: Path, config: Path, root: Path) -> list[Path]:
    """As NeMo 2: every key has the prefix of the module, the common state is Lightning's."""
    weights = root / "weights"
    without_arguments(source, weights)
    metadata = pickle.loads((weights / ".metadata").read_bytes())

    def renamed(key: str) -> str:
        head = "optimizer.state."
        if key.startswith(head):
            kind, _, rest = key.removeprefix(head).partition(".")
            return f"{head}{kind}.module.{rest}"
        return key if key.startswith(("optimizer.", "rng_state")) else f"module.{key}"

    metadata.state_dict_metadata = {renamed(key): each for key, each in metadata.state_dict_metadata.items()}
    metadata.storage_data = {replace(i, fqn=renamed(i.fqn)): each for i, each in metadata.storage_data.items()}
    (weights / ".metadata").write_bytes(pickle.dumps(metadata))
    state = torch.load(weights / "common.pt", weights_only=False)
    content = {"global_step": 10, "epoch": 0, "pytorch-lightning_version": "2.4.0", "loops": {}, "callbacks": {}}
    content |= {"optimizer": [state["optimizer"]], "content_metadata": state["content_metadata"]}
    torch.save(content, weights / "common.pt")
    (root / "context").mkdir()
    (root / "context/model.yaml").write_text(model_yaml(CORE, LLAMA_GPT))
    return [root, root / "weights"]


PROGRAMS = {
    "Megatron-Bridge": of_bridge,
    "NeMo-RL": of_nemo_rl,
    "verl": of_verl,
    "verl in parts": of_verl_in_parts,
    "NeMo 2": of_nemo,
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What Megatron-LM's own checkpoint becomes."""
    folder = tmp_path_factory.mktemp("exported") / "hf"
    convert(plain("llama_tp2pp2"), folder, overwrite=True)
    return folder


@pytest.mark.parametrize("program", PROGRAMS)
def test_what_has_no_arguments_becomes_what_it_became(program: str, exported: Path, tmp_path: Path) -> None:
    source = plain("llama_tp2pp2")
    paths = PROGRAMS[program](source, exported / "config.json", tmp_path / "run")
    options: dict[str, Any] = {"vocab_size": 500} if program == "NeMo 2" else {}  # which no file of NeMo's says
    for number, path in enumerate(paths):
        convert(path, tmp_path / f"hf{number}", family="llama", **options)
        for file in ("model.safetensors", "config.json"):
            assert (tmp_path / f"hf{number}" / file).read_bytes() == (exported / file).read_bytes(), (path, file)
    actual, wanted = inspect(paths[0]), inspect(source)
    assert (actual.family, actual.iteration) == (wanted.family, 10)
    # NeMo leaves the vocabulary to its tokenizer
    assert actual.vocab_size == (wanted.padded_vocab_size if program == "NeMo 2" else wanted.vocab_size)
    assert verify(paths[0], exported, **options).equal
    assert diff(paths[0], source, **options).num_changed == 0


@pytest.mark.parametrize("program", PROGRAMS)
def test_optimizer_state_goes_along(program: str, exported: Path, tmp_path: Path) -> None:
    source = plain("llama_tp2pp2")
    path = PROGRAMS[program](source, exported / "config.json", tmp_path / "run")[0]
    reshard(source, tmp_path / "wanted", tp=1, pp=1)
    reshard(path, tmp_path / "found", tp=1, pp=1)
    actual, wanted = states_in(tmp_path / "found"), states_in(tmp_path / "wanted")
    assert actual.keys() == wanted.keys()
    assert all(torch.equal(actual[key], tensor) for key, tensor in wanted.items())
    first, second = (open_torch_dist(tmp_path / name) for name in ("found", "wanted"))
    assert first.path.name == second.path.name == "iter_0000010"
    assert first.training is not None
    assert second.training is not None
    assert first.training.groups == second.training.groups
    # Lightning has a scheduler of its own
    assert first.training.scheduler == (None if program == "NeMo 2" else second.training.scheduler)
    message, before = (dict(each.common.args or {}) for each in (first, second))
    architecture = [
        "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels normalization",
        "layernorm_epsilon swiglu add_bias_linear untie_embeddings_and_output_weights position_embedding_type",
        "rotary_base rotary_percent max_position_embeddings padded_vocab_size bf16 fp16 attention_dropout",
        "hidden_dropout transformer_impl tensor_model_parallel_size pipeline_model_parallel_size ckpt_format",
        "use_distributed_optimizer group_query_attention",
    ]
    names = " ".join(architecture).split()
    assert {name: message.get(name) for name in names} == {name: before.get(name) for name in names}


def test_an_activation_that_was_left_out_is_asked_for(exported: Path, tmp_path: Path) -> None:
    """Megatron-Bridge 0.4 to 0.6 leaves functions out of a nested model, and its own default would be a gelu."""
    config = run_config(CORE, {**LLAMA_GPT, "vocab_size": 500, "should_pad_vocab": True})
    del config["model"]["activation_func"], config["model"]["transformer_layer_spec"]
    path = as_bridge(plain("llama_tp2pp2"), tmp_path / "run", config)
    with pytest.raises(ConfigError, match="does not name its activation"):
        convert(path, tmp_path / "hf")
    convert(path, tmp_path / "hf", hf_config=exported)
    assert (tmp_path / "hf/model.safetensors").read_bytes() == (exported / "model.safetensors").read_bytes()
    reshard(path, tmp_path / "again", tp=1, hf_config=exported)
    actual, wanted = states_in(tmp_path / "again"), states_in(plain("llama_tp2pp2"))
    assert all(torch.equal(actual[key], tensor) for key, tensor in wanted.items())


@pytest.mark.parametrize("program", ["Megatron-Bridge", "verl"])
def test_buckets_are_found_by_what_is_recorded(program: str, exported: Path, tmp_path: Path) -> None:
    source = plain(DENSE)
    path = PROGRAMS[program](source, exported / "config.json", tmp_path / "run")[0]
    reshard(path, tmp_path / "found", tp=1)
    actual, wanted = states_in(tmp_path / "found"), states_in(source)
    assert len({state for _, state in wanted}) == 4
    assert actual.keys() == wanted.keys()
    assert all(torch.equal(actual[key], tensor) for key, tensor in wanted.items())


def test_a_run_config_is_written_again(tmp_path: Path) -> None:
    gpt = {**LLAMA_GPT, "vocab_size": 500, "should_pad_vocab": True}
    core = {**CORE, "pipeline_model_parallel_size": 2, "sequence_parallel": True, "num_query_groups": 2}
    config = run_config(
        core, gpt, dataset={"_target_": "megatron.bridge.training.config.GPTDatasetConfig", "split": "1"}
    )
    path = as_bridge(plain("llama_tp2pp2"), tmp_path / "run", config)
    before = config["model"]
    reshard(path, tmp_path / "again", tp=1, pp=1)
    folder = tmp_path / "again/iter_0000010"
    again = yaml.safe_load((folder / "run_config.yaml").read_text())
    sizes = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "expert_tensor_parallel_size": None}
    changed = {name for name, value in again["model"].items() if before[name] != value}
    assert changed <= {*sizes, "sequence_parallel"}
    assert again["model"].keys() == before.keys()
    assert again["model"]["sequence_parallel"] is False
    assert again["model"]["tensor_model_parallel_size"] == 1
    checkpoint = {**config["checkpoint"], "save_rng": False, "dist_ckpt_optim_fully_reshardable": True}
    assert again["checkpoint"] == checkpoint
    others = ("_target_", "optimizer", "tokenizer", "ddp", "peft", "dataset")
    assert {name: again[name] for name in others} == {name: config[name] for name in others}
    for state in (folder / "train_state.pt", tmp_path / "again/latest_train_state.pt"):
        assert state.read_bytes() == (path / "iter_0000010/train_state.pt").read_bytes()
    common = open_torch_dist(folder).common
    assert common.args is not None
    assert common.args["consumed_train_samples"] == 80
    assert common.state["num_floating_point_operations_so_far"] > 0
    # and back, to what it was
    reshard(tmp_path / "again", tmp_path / "back", tp=2, pp=2)
    assert inspect(tmp_path / "back").layout == inspect(real_checkpoint("llama_tp2pp2")).layout


def test_a_nested_model_says_the_same(tmp_path: Path) -> None:
    """Megatron-Bridge 0.5 and later may keep Megatron Core's fields in a section of their own."""
    flat = run_config(CORE, {**LLAMA_GPT, "vocab_size": 500, "should_pad_vocab": True})
    model = flat["model"]
    own = {
        *LLAMA_GPT,
        "vocab_size",
        "should_pad_vocab",
        "rotary_base",
        "rotary_percent",
        "make_vocab_size_divisible_by",
    }
    nested = {
        "_target_": "megatron.bridge.models.gpt.gpt_builder.GPTModelConfig",
        "_builder_": "megatron.bridge.models.gpt.gpt_builder.GPTModelBuilder",
        **{name: model[name] for name in own if name != "share_embeddings_and_output_weights"},
        "transformer": {name: value for name, value in model.items() if name not in own}
        | {"_target_": "megatron.bridge.models.transformer_config.TransformerConfig", "activation_func": "silu"},
    }
    path = as_bridge(plain("llama_tp2pp2"), tmp_path / "run", {**flat, "model": nested})
    wanted = as_bridge(plain("llama_tp2pp2"), tmp_path / "flat", flat)
    actual, checkpoint = (open_torch_dist(each / "iter_0000010").common.args for each in (path, wanted))
    assert actual is not None
    assert checkpoint is not None
    assert {name: actual.get(name) for name in checkpoint} == checkpoint
    reshard(path, tmp_path / "again", tp=1, pp=1)
    again = yaml.safe_load((tmp_path / "again/iter_0000010/run_config.yaml").read_text())
    assert again["model"]["transformer"]["tensor_model_parallel_size"] == 1
    assert "tensor_model_parallel_size" not in again["model"]


@pytest.mark.parametrize("package", ["slime", "miles"])
def test_plain_runs_with_classes_of_their_own_are_read(
    package: str, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """slime and miles store Megatron-LM's arguments, and with them their data sets for evaluation."""
    shutil.copytree(plain("llama_tp2pp2"), tmp_path / "iter_0000010")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10")
    (tmp_path / "rollout").mkdir()
    module = types.ModuleType(f"{package}.utils.eval_config")
    kind = type("EvalDatasetConfig", (), {"__module__": module.__name__})
    vars(module)["EvalDatasetConfig"] = kind
    common = tmp_path / "iter_0000010/common.pt"
    state = torch.load(common, weights_only=False)
    state["args"].eval_datasets = [kind()]
    with monkeypatch.context() as patched:
        for name in (package, f"{package}.utils", module.__name__):
            patched.setitem(sys.modules, name, module)
        torch.save(state, common)
    convert(tmp_path, tmp_path / "hf")
    assert (tmp_path / "hf/model.safetensors").read_bytes() == (exported / "model.safetensors").read_bytes()
    assert package not in sys.modules


def test_rank_files_with_a_run_config(tmp_path: Path) -> None:
    source = real_checkpoint("llama_legacy_tp2pp2")
    shutil.copytree(source, tmp_path / "run")
    folder = next((tmp_path / "run").glob("iter_*"))
    for file in folder.glob("mp_rank_*/model_optim_rng.pt"):
        state = torch.load(file, weights_only=False, map_location="cpu")
        del state["args"]
        torch.save(state, file)
    core = {**CORE, "pipeline_model_parallel_size": 2}
    gpt = {**LLAMA_GPT, "vocab_size": 500, "should_pad_vocab": True}
    write_yaml(folder / "run_config.yaml", run_config(core, gpt))
    assert verify(tmp_path / "run", source).equal


def test_weights_that_verl_left_to_hugging_face_are_found_there(exported: Path, tmp_path: Path) -> None:
    role = tmp_path / "run/global_step_10/actor"
    as_of_verl(plain("llama_tp2pp2"), role / "optimizer/dist_ckpt")
    only(role / "optimizer/dist_ckpt", lambda key: key.startswith("optimizer."))
    shutil.copytree(exported, role / "model/huggingface")
    (role / "ckpt_contents.json").write_text(json.dumps({"schema_version": 2}))
    assert inspect(tmp_path / "run/global_step_10").path == str(role / "model/huggingface")
    assert verify(role, exported).equal
