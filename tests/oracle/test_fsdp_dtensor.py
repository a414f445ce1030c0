"""Saves of Megatron-FSDP, made by Megatron Core's own functions and torch's DCP on two ranks; and what it loads."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fixtures.chained import save
from fixtures.fsdp_dtensor import load_fsdp_dtensor, save_fsdp_dtensor
from fixtures.optimizer import SCHEDULER, STEP, State, random_state
from mcore_convert import convert, inspect, reshard, verify
from mcore_convert.checkpoints.identify import identify, open_checkpoint
from mcore_convert.comparison.logits import tensors_of
from mcore_convert.errors import ConvertError
from mcore_convert.formats.files import dcp
from mcore_convert.formats.files.dcp import Chunk
from mcore_convert.formats.files.dcp_metadata import metadata_bytes
from mcore_convert.spec.shard import Box
from mcore_convert.storage.views import TensorMeta
from tests.conftest import HfMaker, real_checkpoint
from tests.oracle.test_megatron_fixtures import ARGS
from tests.ranks import run_ranks
from tests.recorders import LLAMA, LLAMA_GPT, run_config, write_yaml
from tests.tensors import assert_same_tensors, dcp_tensors, hf_tensors
from train_entry.checkpoints.source import is_ours

ITERATION = "iter_0000010"
EXPERTS: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 16,
    "ffn_hidden_size": 24,
    "num_attention_heads": 4,
    "kv_channels": 4,
    "num_query_groups": 2,
    "max_position_embeddings": 32,
    "padded_vocab_size": 128,
    "vocab_size": 100,
    "num_experts": 4,
    "moe_ffn_hidden_size": 12,
    "moe_router_topk": 2,
    "swiglu": True,
    "add_bias_linear": False,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True,
    "transformer_impl": "local",
}


# Tensor and expert parallelism of the two ranks; without either they are data-parallel.
LAYOUTS: dict[str, dict[str, Any]] = {"dp2": {}, "tp2": {"tp": 2}, "ep2": {"ep": 2}}


@dataclass(frozen=True)
class Run:
    """What was saved, and where: `state` has the global tensors, from nothing of ours."""

    args: dict[str, Any]
    state: State
    layout: dict[str, Any]
    path: Path

    def load(self, directory: Path) -> int:
        """Load a directory on a rank as the run would; how many of its tensors and numbers are others."""
        return load_fsdp_dtensor(self.args, self.state, directory, **self.layout)


@pytest.fixture(scope="module")
def source(hf_checkpoint: HfMaker) -> Path:
    return hf_checkpoint("llama-gqa", config={"vocab_size": 512})


@pytest.fixture(scope="module")
def runs(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Runs whose master copies are the weights of the Hugging Face model, and one of a model with experts."""
    model = identify(source)
    args = {**model.args, "padded_vocab_size": 512, "tokenizer_type": None, "transformer_impl": "local"}
    moments = random_state(args)
    weights = {name: tensor.float() for name, tensor in tensors_of(model)}
    llama = args, State(weights, moments.exp_avg, moments.exp_avg_sq)
    held = {"dp2": llama, "tp2": llama, "ep2": (EXPERTS, random_state(EXPERTS))}
    runs = {name: Run(*held[name], layout, tmp_path_factory.mktemp(name) / "run") for name, layout in LAYOUTS.items()}

    def save() -> None:
        for run in runs.values():
            save_fsdp_dtensor(run.args, run.state, run.path, **run.layout)

    run_ranks(2, save)
    return runs


@pytest.mark.parametrize("name", ["dp2", "tp2"])
def test_to_hugging_face(name: str, runs: dict[str, Run], source: Path, tmp_path: Path) -> None:
    """The main weights in fp32, bit for bit; rounded with --dtype."""
    done = convert(runs[name].path, tmp_path / "hf", family="llama", hf_config=source)
    assert any("weights stay float32" in note for note in done.notes)
    wanted = hf_tensors(source)
    assert_same_tensors(hf_tensors(tmp_path / "hf"), {key: tensor.float() for key, tensor in wanted.items()})
    assert verify(runs[name].path, tmp_path / "hf").equal


def stacked(tensors: Mapping[str, Tensor], key: str) -> Tensor:
    """Return the tensor of a `torch_dist` key, whose layers and experts are leading dimensions."""
    layer, experts = ".layers.{}.", ".experts.experts.{}."
    if layer.format("0") not in "".join(tensors) or ".layers." not in key:
        return tensors[key]
    template = key.replace(".layers.", layer).replace(".experts.experts.", experts.replace("{}", "{{}}"))
    parts: list[Tensor] = []
    while (name := template.format(len(parts))).format(0) in tensors:
        each = [name.format(expert) for expert in range(EXPERTS["num_experts"])] if "{}" in name else [name]
        result = [tensors[one] for one in each]
        parts.append(torch.stack(result) if "{}" in name else result[0])
    return torch.stack(parts)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_to_torch_dist(layout: str, runs: dict[str, Run], tmp_path: Path) -> None:
    """Every state is that of the run, bit for bit, and the weights are the master copies rounded."""
    run = runs[layout]
    done = reshard(run.path, tmp_path / "dist", to="torch_dist", **run.layout)
    assert any("become bfloat16" in note for note in done.notes)
    actual = dcp_tensors(tmp_path / "dist" / ITERATION)
    weights = [key for key in actual if not key.startswith("optimizer.") and "_extra_state" not in key]
    assert len(weights) == 9 + (layout == "ep2")
    for key in weights:
        name = key if layout != "ep2" else key.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
        master = stacked(run.state.master, name)
        assert torch.equal(actual[key], master.bfloat16()), key
        assert torch.equal(actual[f"optimizer.state.param.{key}"], master), key
        for state in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(actual[f"optimizer.state.{state}.{key}"], stacked(getattr(run.state, state), name)), key
    assert len(actual) == 4 * len(weights)
    common = torch.load(tmp_path / "dist" / ITERATION / "common.pt", weights_only=False)
    (part,) = [common["optimizer"]] if layout != "ep2" else [common["optimizer"][0]]
    groups = part["optimizer"]["param_groups"]
    assert {(group["wd_mult"], group["weight_decay"], group["step"]) for group in groups} == {
        (1.0, 0.1, STEP),
        (0.0, 0.0, STEP),
    }
    assert (common["iteration"], common["opt_param_scheduler"]) == (10, SCHEDULER)
    assert common["num_floating_point_operations_so_far"] == 1e9
    assert (common["args"].ckpt_format, common["args"].use_megatron_fsdp) == ("torch_dist", False)
    assert verify(run.path, tmp_path / "dist").equal


def groups_of(path: Path) -> list[list[tuple[str, Any]]]:
    """Return the parameter groups of a checkpoint, in an order of their own."""
    training = open_checkpoint(path).training
    assert training is not None
    return sorted((sorted(group.items()) for group in training.groups), key=repr)


def test_a_run_loads_ours(runs: dict[str, Run], tmp_path: Path) -> None:
    """From `torch_dist` and from `torch`: each key that a run asks for is there, with the run's own values."""
    for name, run in runs.items():
        form, layout = ("torch", dict[str, Any](pp=2)) if name == "dp2" else ("torch_dist", run.layout)
        between, ours = tmp_path / name / form, tmp_path / name / "fsdp"
        reshard(run.path, between, to=form, **layout)
        reshard(between, ours, to="fsdp_dtensor", **run.layout)
        assert groups_of(run.path) == groups_of(ours)

    def load() -> dict[str, int]:
        return {name: run.load(tmp_path / name / "fsdp" / ITERATION) for name, run in runs.items()}

    assert run_ranks(2, load) == [dict.fromkeys(LAYOUTS, 0)] * 2


Keys = dict[str, tuple[TensorMeta, list[Chunk]]]


def changed(path: Path, copy: Path, change: Callable[[Keys], Keys], *, without: str = "nothing") -> Path:
    """Return a copy of an iteration with other tensors in its `.metadata`, and without some objects."""
    shutil.copytree(path, copy)
    (copy / "mcore_convert.json").unlink(missing_ok=True)
    directory = dcp.read(copy)
    keys = change({key: (meta, directory.chunks[key]) for key, meta in directory.tensors.items()})
    objects = {key: place for key, place in directory.objects.items() if not key.endswith(without)}
    tensors, chunks = {key: meta for key, (meta, _) in keys.items()}, {key: parts for key, (_, parts) in keys.items()}
    (copy / dcp.METADATA).write_bytes(metadata_bytes(tensors, chunks, objects))
    return copy


def whole_fc1(keys: Keys) -> Keys:
    """Return the tensors with gate and up in one, as a writer leaves them that does not split them."""
    joined: Keys = {}
    for key, (meta, chunks) in keys.items():
        if "linear_fc1.weight_v" not in key:
            joined[key.replace("linear_fc1.weight_w", "linear_fc1.weight")] = meta, chunks
    for key, (meta, chunks) in keys.items():
        if "linear_fc1.weight_v" in key:
            name, rows = key.replace("linear_fc1.weight_v", "linear_fc1.weight"), meta.shape[0]
            below = [Chunk(Box((box.offsets[0] + rows, *box.offsets[1:]), box.sizes), place) for box, place in chunks]
            joined[name] = TensorMeta((2 * rows, *meta.shape[1:]), meta.dtype), [*joined[name][1], *below]
    return joined


def test_gate_and_up_in_one_tensor(runs: dict[str, Run], tmp_path: Path) -> None:
    """It is read where one rank had all of it, and refused where each rank had rows of both."""
    alike = changed(runs["dp2"].path / ITERATION, tmp_path / "dp2", whole_fc1)
    assert verify(alike, runs["dp2"].path).equal
    interleaved = changed(runs["tp2"].path / ITERATION, tmp_path / "tp2", whole_fc1)
    with pytest.raises(ConvertError, match="is not split into `_w` and `_v`, and was saved by 2 tensor ranks"):
        reshard(interleaved, tmp_path / "dist", to="torch_dist")


def test_names_of_transformer_engine(runs: dict[str, Run], tmp_path: Path) -> None:
    """Grouped experts are numbered at the end, where Megatron Core finds the number, and gate and up come after it."""
    from megatron.core.transformer.fsdp_dtensor_checkpoint import get_expert_index_from_key

    def renamed(keys: Keys) -> Keys:
        experts = re.compile(r"local_experts\.(\d+)\.(linear_fc\d\.weight)")
        return {
            experts.sub(r"\2\1", key).replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_"): held
            for key, held in keys.items()
        }

    grouped = changed(runs["ep2"].path / ITERATION, tmp_path / "grouped", renamed)
    assert verify(grouped, runs["ep2"].path).equal
    reshard(grouped, tmp_path / "ours", ep=2)
    stored, written = (open_checkpoint(path) for path in (grouped, tmp_path / "ours"))
    assert stored.tensors == written.tensors
    last = "model.module.decoder.layers.1.mlp.experts.linear_fc1.weight3"
    assert {f"{last}_w", f"{last}_v"} <= set(written.tensors)
    assert get_expert_index_from_key(f"{last}_w") == 3
    assert verify(tmp_path / "ours", runs["ep2"].path).equal


def test_a_configuration_stands_for_arguments(runs: dict[str, Run], source: Path, tmp_path: Path) -> None:
    """As in what another program than Megatron-LM saved."""
    path = changed(runs["dp2"].path / ITERATION, tmp_path / "bare", lambda keys: keys, without="args")
    with pytest.raises(ConvertError, match="stores no arguments"):
        convert(path, tmp_path / "hf")
    convert(path, tmp_path / "hf", hf_config=source)
    wanted = {key: tensor.float() for key, tensor in hf_tensors(source).items()}
    assert_same_tensors(hf_tensors(tmp_path / "hf"), wanted)
    assert not is_ours(open_checkpoint(path))


def test_what_megatron_bridge_saves(tmp_path: Path) -> None:
    """The same keys, with `run_config.yaml` in the place of arguments."""
    original = real_checkpoint("llama_tp2dp2")
    reshard(original, tmp_path / "fsdp", to="fsdp_dtensor")
    bare = changed(tmp_path / "fsdp" / ITERATION, tmp_path / "bridge" / ITERATION, lambda keys: keys, without="args")
    config = run_config(LLAMA, {**LLAMA_GPT, "vocab_size": 500, "should_pad_vocab": True})
    write_yaml(bare / "run_config.yaml", config)
    assert inspect(bare).family == "llama"
    reshard(bare, tmp_path / "dist", to="torch_dist", tp=2)
    assert verify(tmp_path / "dist", original).equal
    assert groups_of(tmp_path / "dist") == groups_of(original)
    torch.save({"step": torch.tensor(10, dtype=torch.int32)}, bare / "train_state.pt")
    reshard(bare, tmp_path / "again")
    assert (tmp_path / "again" / ITERATION / "train_state.pt").is_file()
    assert inspect(tmp_path / "again").format == "fsdp_dtensor"


def test_state_of_another_optimizer_is_refused(runs: dict[str, Run], tmp_path: Path) -> None:
    def renamed(keys: Keys) -> Keys:
        return {key.replace("weight.exp_avg_sq", "weight.momentum_buffer"): held for key, held in keys.items()}

    path = changed(runs["dp2"].path / ITERATION, tmp_path / "momentum", renamed)
    with pytest.raises(ConvertError, match="have no place in the state of a weight") as refused:
        reshard(path, tmp_path / "dist", to="torch_dist")
    assert any("momentum_buffer" in item for item in refused.value.items)
    reshard(path, tmp_path / "weights", to="torch_dist", optimizer=False)


def test_weights_alone_stay_main_weights(runs: dict[str, Run], tmp_path: Path) -> None:
    """In their own format they stay exact, and the run stays one in bfloat16; elsewhere they are rounded."""
    key, master = "embedding.word_embeddings.weight", runs["dp2"].state.master["embedding.word_embeddings.weight"]
    reshard(runs["dp2"].path, tmp_path / "fsdp", optimizer=False)
    actual = dcp_tensors(tmp_path / "fsdp" / "release")
    assert torch.equal(actual[f"model.module.{key}"], master)
    assert not any(name.startswith("optimizer.") for name in actual)
    assert (open_checkpoint(tmp_path / "fsdp").common.args or {})["bf16"] is True
    reshard(tmp_path / "fsdp", tmp_path / "dist", to="torch_dist")
    assert torch.equal(dcp_tensors(tmp_path / "dist" / "release")[key], master.bfloat16())


def test_a_missing_weight_is_named(runs: dict[str, Run], tmp_path: Path) -> None:
    gone = "model.module.decoder.layers.1.mlp.linear_fc2.weight"
    path = changed(
        runs["dp2"].path / ITERATION, tmp_path / "gone", lambda keys: {k: v for k, v in keys.items() if k != gone}
    )
    with pytest.raises(ConvertError) as refused:
        convert(path, tmp_path / "hf")
    assert gone in "".join([str(refused.value), *refused.value.items])


def test_pipeline_stages_are_refused(runs: dict[str, Run], tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match="`fsdp_dtensor` has no pipeline stages"):
        reshard(runs["dp2"].path, tmp_path / "fsdp", pp=2)


def test_a_damaged_master_copy_differs(runs: dict[str, Run], tmp_path: Path) -> None:
    """Verify finds it in either form, and weights that it does not round to are not left out in silence."""
    key = "decoder.layers.{layer}.self_attention.linear_proj.weight"
    reshard(runs["dp2"].path, tmp_path / "dist", to="torch_dist", checksums=False)
    name = "optimizer.state.param.decoder.layers.self_attention.linear_proj.weight"
    view = dcp.read(tmp_path / "dist" / ITERATION).slots(name)[0].view
    with view.path.open("r+b") as file:
        file.seek(view.offset + 2)
        file.write(b"\x55")
    (tmp_path / "dist" / ITERATION / "mcore_convert.json").unlink(missing_ok=True)
    with pytest.raises(ConvertError, match=f"master copy of `{key.format(layer=0)}` does not round to the weight"):
        reshard(tmp_path / "dist", tmp_path / "fsdp", to="fsdp_dtensor")


def test_steps_of_torchs_own_adam(runs: dict[str, Run], tmp_path: Path) -> None:
    """They are counted for each parameter, and no group has them."""
    reshard(runs["dp2"].path, tmp_path / "ours", to="fsdp_dtensor")
    path = changed(tmp_path / "ours" / ITERATION, tmp_path / "torch", lambda keys: keys, without=".step")
    training = open_checkpoint(path).training
    assert training is not None
    assert not training.steps_by_group
    assert [group["step"] for group in training.groups] == [STEP, STEP]


def test_other_optimizers_have_no_place(tmp_path: Path) -> None:
    """Megatron-FSDP would split both of Adam's moments, and finds no others."""
    run_ranks(1, lambda: save(ARGS, "lion", random_state(ARGS), tmp_path / "lion", "torch_dist"))
    with pytest.raises(ConvertError, match="`fsdp_dtensor` holds Adam's state alone"):
        reshard(tmp_path / "lion", tmp_path / "fsdp", to="fsdp_dtensor")
    reshard(tmp_path / "lion", tmp_path / "fsdp", to="fsdp_dtensor", optimizer=False)


def test_a_real_run_with_latent_attention_and_experts(tmp_path: Path) -> None:
    """Each state of each weight of a DeepSeek-V3 that Megatron-LM trained; biases of its router have none."""
    reshard(real_checkpoint("dsv3_legacy_ep2"), tmp_path / "fsdp", to="fsdp_dtensor", ep=2)
    assert verify(tmp_path / "fsdp", real_checkpoint("dsv3_legacy_ep2")).equal
    checkpoint = open_checkpoint(tmp_path / "fsdp")
    biases = [key for key in checkpoint.tensors if key.endswith("expert_bias")]
    assert len(biases) == 3
    assert not [key for key in checkpoint.optimizer_keys if "expert_bias" in key]
