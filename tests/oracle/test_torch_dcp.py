"""Torch DCP with Hugging Face's names: models of transformers under FSDP2 on two ranks, saved as two programs do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_convert import convert, inspect, verify
from mcore_convert.errors import ConvertError
from tests.conftest import HfMaker
from tests.ranks import run_ranks
from tests.tensors import assert_same_tensors, hf_tensors

PROGRAMS = {"llama-gqa": "accelerate", "gpt2": "torchtitan"}


@pytest.fixture(scope="module")
def saved(hf_checkpoint: HfMaker, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The directory that each program leaves of a model, with the model's configuration."""
    from transformers import AutoModelForCausalLM

    models = {name: AutoModelForCausalLM.from_pretrained(hf_checkpoint(name)) for name in PROGRAMS}
    paths = {name: tmp_path_factory.mktemp(program) for name, program in PROGRAMS.items()}

    def save() -> None:
        for name, model in models.items():
            _save(model, paths[name], PROGRAMS[name])

    run_ranks(2, save)
    for name, path in paths.items():
        shutil.copy(hf_checkpoint(name) / "config.json", path)
    return paths


def _save(model: Any, path: Path, program: str) -> None:
    """Save what accelerate's `save_fsdp_model` and torchtitan's `CheckpointManager` hand to torch's DCP,
    on each rank.
    """
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint import state_dict as states
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    kept = {name: tensor.to_local().clone() for name, tensor in model.state_dict().items()}
    optimizer.step()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.to_local().copy_(kept[name])
    weights = states.get_model_state_dict(model)
    flat = states.StateDictOptions(flatten_optimizer_state_dict=True)
    moments = states.get_optimizer_state_dict(model, optimizer, options=flat)
    beside = {"optimizer": moments, "train_state": {"step": torch.tensor(3)}, "lr_scheduler": {"last_epoch": 3}}
    whole: dict[str, Any] = {"model": weights} if program == "accelerate" else {**weights, **beside}
    folder = path / "pytorch_model_fsdp_0" if program == "accelerate" else path
    dcp.save(whole, storage_writer=dcp.FileSystemWriter(folder))


@pytest.mark.parametrize("name", PROGRAMS)
def test_dcp_is_the_model(name: str, saved: dict[str, Path], hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    source = hf_checkpoint(name)
    assert inspect(saved[name]).format == "dcp"
    done = convert(saved[name], tmp_path / "dist", tp=2)
    assert any("optimizer state is left behind" in note for note in done.notes) == (name == "gpt2")
    convert(tmp_path / "dist", tmp_path / "hf", hf_config=source)
    assert_same_tensors(hf_tensors(tmp_path / "hf"), hf_tensors(source))
    assert verify(saved[name], source).equal
    convert(saved[name], tmp_path / "straight", to="hf")
    assert_same_tensors(hf_tensors(tmp_path / "straight"), hf_tensors(source))


def test_the_configuration_may_be_given(saved: dict[str, Path], hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    """Its dtype is that of the tensors, which a trainer keeps in float32."""
    source = hf_checkpoint("llama-gqa")
    alone = tmp_path / "alone"
    shutil.copytree(saved["llama-gqa"] / "pytorch_model_fsdp_0", alone)
    with pytest.raises(ConvertError, match=r"has no `config\.json`") as refused:
        convert(alone, tmp_path / "dist")
    assert refused.value.hint == "pass the model's configuration: --hf-config PATH"
    config = json.loads((source / "config.json").read_text())
    config["dtype" if "dtype" in config else "torch_dtype"] = "bfloat16"
    (tmp_path / "other.json").write_text(json.dumps(config))
    convert(alone, tmp_path / "hf", to="hf", hf_config=tmp_path / "other.json")
    assert_same_tensors(hf_tensors(tmp_path / "hf"), hf_tensors(source))
    written = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert written.get("dtype", written.get("torch_dtype")) == "float32"
