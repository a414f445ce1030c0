"""Rounding to another dtype: torch's values, for every element there can be."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from mcore_convert.checkpoints.identify import identify
from mcore_convert.checkpoints.weights import find_weights
from mcore_convert.conversion.execute import execute
from mcore_convert.conversion.prepare import plan_conversion
from mcore_convert.conversion.target import Target
from mcore_convert.errors import ConvertError
from mcore_convert.publishing.hf_tensors import hf_tensors
from mcore_convert.publishing.readback import read_back
from mcore_convert.storage.progress import Meter
from mcore_convert.storage.values import cast
from tests.conftest import HfMaker

DTYPES = ("float32", "float16", "bfloat16")


def as_tensor(bits: NDArray[np.unsignedinteger], dtype: str) -> Tensor:
    return torch.from_numpy(bits.view(f"i{bits.itemsize}")).view(getattr(torch, dtype))


def every(dtype: str) -> NDArray[np.unsignedinteger]:
    """Return all bit patterns of 16 bits; of 32 bits many, with every tie between two neighbours of 16 bits."""
    if dtype != "float32":
        return np.arange(2**16, dtype=np.uint16)
    high = np.arange(2**16, dtype=np.uint32) << 16
    drawn = np.random.default_rng(0).integers(0, 2**32, 2**20, dtype=np.uint32)
    halves = as_tensor(np.arange(2**16, dtype=np.uint16), "float16").float()
    between = (halves[:-1] + halves[1:]) / 2  # the ties of float16, exact in float32
    ties = between.view(torch.int32).numpy().view(np.uint32)
    return np.concatenate([high, high | 0x8000, high | 0x7FFF, high | 0x8001, high | 0xFFFF, drawn, ties])


@pytest.mark.parametrize("target", DTYPES)
@pytest.mark.parametrize("source", DTYPES)
def test_a_cast_gives_what_torch_gives(source: str, target: str) -> None:
    bits = every(source)
    exact = as_tensor(bits, source)
    wanted = exact.to(getattr(torch, target))
    beyond = wanted.isinf() & ~exact.isinf()
    for index in beyond.nonzero().flatten()[:: max(1, int(beyond.sum()) // 5)].tolist():
        with pytest.raises(OverflowError, match=f"beyond the largest of {target}"):
            cast(bits[index : index + 1], source, target)
    got = as_tensor(cast(bits[~beyond.numpy()], source, target), target)
    wanted = wanted[~beyond]
    assert torch.equal(got.isnan(), wanted.isnan())
    same = ~wanted.isnan()
    whole = torch.int32 if target == "float32" else torch.int16
    assert torch.equal(got[same].view(whole), wanted[same].view(whole))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["gpt2", "llama-gqa"])
def test_a_directory_is_rounded_as_a_whole(name: str, dtype: str, hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    source = hf_checkpoint(name, fill="normal")
    model = identify(source)
    execute(plan_conversion(model, Target(tmp_path / "out", "hf", dtype=dtype)))
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert after.keys() == before.keys()
    for key, tensor in before.items():
        assert torch.equal(after[key], tensor.to(getattr(torch, dtype))), key
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype == getattr(torch, dtype)
    before, after = AutoConfig.from_pretrained(source).to_dict(), AutoConfig.from_pretrained(tmp_path / "out").to_dict()
    assert {**after, "_name_or_path": ""} == {**before, "_name_or_path": "", "dtype": dtype}


def test_infinity_is_refused(hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    plan = plan_conversion(identify(hf_checkpoint("gpt2")), Target(tmp_path / "out", "hf", dtype="float16"))
    with pytest.raises(ConvertError) as refused:
        execute(plan)
    assert refused.value.message.endswith("has a number beyond the largest of float16")
    assert refused.value.hint == "--dtype bfloat16 has the range of float32"
    assert not list(tmp_path.iterdir())


def test_what_was_written_wrongly_is_found(hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    """Every tensor is read again: a bit that flipped on the way is seen, and named."""
    model = identify(hf_checkpoint("llama-gqa"))
    plan = plan_conversion(model, Target(tmp_path / "out", "hf", dtype="bfloat16"))
    execute(plan)
    tensors = list(hf_tensors(model.family, model.dims, find_weights(model.family, model.dims, model.checkpoint)))
    written = identify(tmp_path / "out").checkpoint.whole_views
    assert read_back(tensors, written, Meter(0, None))
    view = written["model.layers.2.mlp.up_proj.weight"]
    with (tmp_path / "out" / "model.safetensors").open("r+b") as file:
        file.seek(view.offset + view.nbytes - 1)
        (last,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([last ^ 1]))
    with pytest.raises(ConvertError, match=r"`model.layers.2.mlp.up_proj.weight` in `model.safetensors` is not what"):
        read_back(tensors, written, Meter(0, None))
