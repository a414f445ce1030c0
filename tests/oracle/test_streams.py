"""Weights for programs: what a conversion and transformers make of a checkpoint, without a file in between."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.checkpoints import LLAMA, make_llama, nbytes_of
from benchmarks.measure import peak_anonymous_bytes
from fixtures.run import make_run
from mcore_convert import convert, iter_hf_weights, load_hf_model
from mcore_convert.errors import ConfigError, ConvertError, UnreadableCheckpoint
from tests.conftest import HfMaker
from tests.tensors import assert_same_tensors, hf_tensors

VARIANTS = ("gpt2", "gpt2-untied", "llama-gqa", "llama-tied", "llama-attention-bias", "mistral")


@pytest.fixture(params=["hf", "torch_dist", "torch"])
def checkpoint(request: pytest.FixtureRequest, hf_checkpoint: HfMaker, tmp_path: Path) -> Any:
    """`checkpoint(name)`: a fixture in each format, at TP2 where the format has a layout."""

    def make(name: str, **options: Any) -> Path:
        source = hf_checkpoint(name, fill="normal", **options)
        if request.param == "hf":
            return source
        convert(source, tmp_path / name, to=request.param, tp=2)
        return tmp_path / name

    return make


@pytest.mark.parametrize("name", VARIANTS)
def test_the_tensors_are_those_of_the_directory(name: str, checkpoint: Any, hf_checkpoint: HfMaker) -> None:
    original, source = hf_tensors(hf_checkpoint(name, fill="normal")), checkpoint(name)
    result = list(iter_hf_weights(source))
    assert_same_tensors(dict(result), original)
    assert len(result) == len(original)
    for _, tensor in result:
        assert tensor.is_contiguous()
        tensor.zero_()  # it is the caller's own: the checkpoint does not change with it
    assert_same_tensors(dict(iter_hf_weights(source)), original)


@pytest.mark.parametrize("dtype", ["bfloat16", torch.float16])
def test_they_are_cast_as_torch_casts(dtype: Any, checkpoint: Any, hf_checkpoint: HfMaker) -> None:
    wanted = getattr(torch, str(dtype).removeprefix("torch."))
    original = hf_tensors(hf_checkpoint("gpt2", fill="normal"))
    actual = dict(iter_hf_weights(checkpoint("gpt2"), dtype=dtype))
    assert_same_tensors(actual, {key: tensor.to(wanted) for key, tensor in original.items()})


def same_models(mine: Any, wanted: Any) -> None:
    """Parameters, buffers, ties, mode, configuration, and what they compute."""
    assert_same_tensors(mine.state_dict(), wanted.state_dict())
    assert_same_tensors(dict(mine.named_buffers()), dict(wanted.named_buffers()))
    ties = [model.get_input_embeddings().weight is model.get_output_embeddings().weight for model in (mine, wanted)]
    assert ties[0] == ties[1] == wanted.config.tie_word_embeddings
    assert mine.training == wanted.training
    assert mine.dtype == wanted.dtype
    for actual, other in ((mine.config, wanted.config), (mine.generation_config, wanted.generation_config)):
        assert {**actual.to_dict(), "_name_or_path": ""} == {**other.to_dict(), "_name_or_path": ""}
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(mine(tokens).logits, wanted(tokens).logits)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_model_is_what_from_pretrained_makes_of_the_conversion(
    name: str, checkpoint: Any, tmp_path: Path, hf_checkpoint: HfMaker
) -> None:
    source = checkpoint(name)
    convert(source, tmp_path / "converted", to="hf")
    same_models(load_hf_model(source), AutoModelForCausalLM.from_pretrained(tmp_path / "converted"))


def test_options_reach_transformers(checkpoint: Any, hf_checkpoint: HfMaker) -> None:
    source = checkpoint("llama-gqa")
    wanted = hf_checkpoint("llama-gqa", fill="normal")
    options: dict[str, Any] = {"dtype": torch.bfloat16, "attn_implementation": "eager"}
    mine, theirs = load_hf_model(source, **options), AutoModelForCausalLM.from_pretrained(wanted, **options)
    same_models(mine, theirs)
    assert mine.config._attn_implementation == "eager"


def test_a_stored_dtype_is_kept(checkpoint: Any, hf_checkpoint: HfMaker) -> None:
    source = checkpoint("llama-gqa", dtype="bfloat16")
    wanted = AutoModelForCausalLM.from_pretrained(hf_checkpoint("llama-gqa", fill="normal", dtype="bfloat16"))
    same_models(load_hf_model(source), wanted)


def test_a_run_is_its_newest_checkpoint(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [10, 20], picture=False)
    convert(run / "checkpoints" / "iter_0000020", tmp_path / "converted", to="hf")
    assert_same_tensors(dict(iter_hf_weights(run)), hf_tensors(tmp_path / "converted"))
    assert load_hf_model(run).config.vocab_size == 389


def test_what_is_not_whole_is_refused_before_the_first_tensor(hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    convert(hf_checkpoint("gpt2"), tmp_path / "dist")
    with pytest.raises(ConfigError, match="no dtype `int8`"):
        iter_hf_weights(tmp_path / "dist", dtype="int8")
    with pytest.raises(ConvertError, match="beyond the largest of float16"):
        list(iter_hf_weights(tmp_path / "dist", dtype="float16"))
    (tmp_path / "dist" / "release" / "__0_0.distcp").unlink()
    with pytest.raises(UnreadableCheckpoint):
        iter_hf_weights(tmp_path / "dist")
    with pytest.raises(UnreadableCheckpoint, match="does not exist"):
        load_hf_model(tmp_path / "nowhere")


SMALL = {"num_hidden_layers": 24, "vocab_size": 16000, "hidden_size": 512, "intermediate_size": 8192, "head_dim": 16}
STREAM = """
import sys, torch
from mcore_convert import iter_hf_weights
for step in range(int(sys.argv[2])):
    for name, tensor in iter_hf_weights(sys.argv[1], dtype=sys.argv[3] or None):
        del tensor
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, int]]:
    """A Megatron checkpoint of 680 MB, and the bytes of its largest tensor."""
    folder = tmp_path_factory.mktemp("large")
    config = LLAMA | SMALL
    source = make_llama(folder / "hf", config, sparse=True)
    convert(source, folder / "dist", tp=2)
    for file in source.glob("*.safetensors"):
        file.unlink()
    yield folder / "dist", nbytes_of((config["vocab_size"], config["hidden_size"]))
    for file in (folder / "dist").rglob("*.distcp"):
        file.unlink()


@pytest.mark.parametrize("dtype", ["", "float16"])
def test_memory_is_that_of_the_largest_tensor(large: tuple[Path, int], dtype: str) -> None:
    path, largest = large

    def peak(times: int) -> int:
        return peak_anonymous_bytes([sys.executable, "-c", STREAM, str(path), str(times), dtype])

    total = sum(file.stat().st_size for file in path.rglob("*.distcp"))
    assert total > 25 * largest
    assert peak(1) - peak(0) < 2 * largest + 40 * 2**20
    assert json.loads((path / "release" / "hf" / "config.json").read_text())["num_hidden_layers"] == 24
