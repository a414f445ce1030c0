"""`zarr` checkpoints: the same tensors as `torch_dist`, from raw chunk files, and a word for each that is not whole."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fixtures.megatron import METADATA, Dialect, random_weights, save_torch_dist
from fixtures.zarr import save_zarr, write_array, zarr_of
from mcore_convert import convert
from mcore_convert.checkpoints.identify import open_checkpoint
from mcore_convert.checkpoints.weights import find_weights
from mcore_convert.errors import UnreadableCheckpoint
from mcore_convert.formats.torch_dist import zarr
from mcore_convert.formats.torch_dist.checkpoint import TorchDistCheckpoint
from mcore_convert.spec import gpt
from mcore_convert.spec.config.arguments import normalise
from mcore_convert.spec.dims import Dims
from mcore_convert.spec.family import Family
from mcore_convert.spec.names import EXP_AVG, MASTER, PARAM, spell
from tests.conftest import HfMaker
from tests.oracle.test_megatron_fixtures import ARGS
from tests.oracle.test_old_classes import assembled
from tests.tensors import assert_same_tensors, hf_tensors

TP2 = {"linear_qkv.weight": 2, "linear_fc1.weight": 4, "word_embeddings.weight": 2, "output_layer.weight": 2}
EMBEDDING, NORM = "embedding.word_embeddings.weight", "decoder.final_layernorm.weight"


@pytest.fixture(autouse=True)
def _quiet() -> None:
    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # that is what no_dist asks for


def known(args: dict[str, Any]) -> tuple[Family, Dims]:
    args = normalise(args)
    rows = args["padded_vocab_size"]
    return gpt.family(args), Dims.of(args, vocab_size=rows, padded_vocab_size=rows)


def tiny(path: Path, tensors: dict[str, Tensor] | None = None) -> Path:
    """Return a model of two tensors, the embedding in 2 x 2 chunks of which some lie at an edge."""
    held = {EMBEDDING: torch.arange(35.0).reshape(7, 5), NORM: torch.arange(5.0), **(tensors or {})}
    return save_zarr(path, held, {"iteration": 3}, chunks=lambda key, shape: (4, 3) if key == EMBEDDING else shape)


def assert_unreadable(path: Path, message: str, *items: str) -> None:
    with pytest.raises(UnreadableCheckpoint, match=message) as error:
        zarr.open_zarr(path).check_whole()
    assert error.value.items == items


@pytest.mark.parametrize("split", [{}, TP2], ids=["tp1", "tp2"])
@pytest.mark.parametrize("dialect", METADATA)
def test_every_weight_is_what_megatron_laid_out(dialect: Dialect, split: dict[str, int], tmp_path: Path) -> None:
    weights = random_weights(ARGS)
    save_torch_dist(ARGS, weights, tmp_path / "torch_dist", dialect=dialect, prefix="model.", dtype=torch.bfloat16)
    zarr_of(tmp_path / "torch_dist" / "iter_0000010", tmp_path / "zarr", split=split)
    checkpoint = zarr.open_zarr(tmp_path / "zarr")
    assert (checkpoint.format, checkpoint.prefix, checkpoint.dialect) == ("zarr", "model.", dialect)
    assert checkpoint.common.iteration == 10
    checkpoint.check_whole()
    family, dims = known(ARGS)
    sources = find_weights(family, dims, checkpoint)
    assert len(sources.slots) == len(weights)
    for item, slots in sources.slots.items():
        assert torch.equal(assembled(slots), weights[str(item)].bfloat16()), str(item)


def test_states_of_the_optimizer(tmp_path: Path) -> None:
    family, dims = known(ARGS)
    weights = random_weights(ARGS)
    stacked: dict[str, Tensor] = {}
    for weight in family.weights:
        assert weight.mcore is not None
        layers = [weights[spell(weight.mcore, at)] for at in (i for n in range(4) for i in weight.at(n, dims))]
        name = weight.mcore.replace(".{layer}", "")
        stacked[name] = torch.stack(layers) if weight.per_layer else layers[0]
    states = {
        f"optimizer.state.{state}.{key}": tensor + number
        for number, state in enumerate(("fp32_param", "exp_avg", "exp_avg_sq"))
        for key, tensor in stacked.items()
    }
    group = {"lr": 0.1, "wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "step": 7, "params": []}
    common = {"iteration": 10, "optimizer": {"optimizer": {"param_groups": [group]}}}
    save_zarr(tmp_path, {**stacked, **states}, common, objects={"rng_state/shard_0_1": [{"seed": 1}]})
    checkpoint = zarr.open_zarr(tmp_path)
    assert "rng_state/shard_0_1" in checkpoint.directory.objects
    assert checkpoint.directory.object("rng_state/shard_0_1") == [{"seed": 1}]
    assert checkpoint.training is not None
    assert checkpoint.training.groups[0]["step"] == 7
    for number, state in enumerate((MASTER, EXP_AVG)):
        sources = find_weights(family, dims, checkpoint, (PARAM, state))
        slots = {item: each for item, each in sources.slots.items() if item.state == state}
        assert len(slots) == len(weights)
        for item, each in slots.items():
            assert torch.equal(assembled(each), weights[spell(item.weight.name, item.at)] + number), str(item)


def test_a_run_of_then_becomes_a_hugging_face_model(hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    original = hf_checkpoint("llama-gqa", dtype="bfloat16")
    convert(original, tmp_path / "torch_dist")
    zarr_of(tmp_path / "torch_dist" / "release", tmp_path / "zarr", split=TP2)
    convert(tmp_path / "zarr", tmp_path / "hf", hf_config=original)
    assert_same_tensors(hf_tensors(tmp_path / "hf"), hf_tensors(original))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool])
def test_chunks_at_an_edge_are_stored_whole(dtype: torch.dtype, tmp_path: Path) -> None:
    tensor = torch.arange(7 * 5 * 2).reshape(7, 5, 2).to(dtype)
    save_zarr(tmp_path, {"a": tensor, "b": tensor[0, 0, 0]}, {}, chunks=lambda key, shape: (4, 3, 2)[: len(shape)])
    directory = zarr.read(tmp_path / "iter_0000010")
    directory.check(["a", "b"])
    assert len(directory.slots("a")) == 4
    assert torch.equal(assembled(directory.slots("a")), tensor)
    assert torch.equal(assembled(directory.slots("b")), tensor[0, 0, 0])


def test_chunks_may_lie_in_folders(tmp_path: Path) -> None:
    tensor = torch.arange(12.0).reshape(4, 3)
    write_array(tmp_path / "a", tensor, (2, 2), dimension_separator="/")
    directory = zarr.read(tmp_path)
    directory.check(["a"])
    assert torch.equal(assembled(directory.slots("a")), tensor)


def test_a_directory_is_found_by_its_tracker_or_its_name(tmp_path: Path) -> None:
    directory = tiny(tmp_path)
    assert not zarr.detect(tmp_path / "nothing")
    assert zarr.detect(directory)
    for path in (tmp_path, directory):
        assert open_checkpoint(path).path == zarr.open_zarr(path).path == directory
    (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    assert_unreadable(tmp_path, "has no tracker file", str(directory))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    assert_unreadable(tmp_path, "names `release`, which has no `.zarray`")
    directory.rename(tmp_path / "release")
    assert open_checkpoint(tmp_path).path == tmp_path / "release"
    (tmp_path / "release" / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    assert not zarr.detect(tmp_path / "release")
    (tmp_path / "release" / "metadata.json").write_text("{")
    assert not zarr.detect(tmp_path / "release")


def test_lost_and_cut_chunks_are_named(tmp_path: Path) -> None:
    directory = tiny(tmp_path)
    (directory / EMBEDDING / "1.0").unlink()
    (directory / EMBEDDING / "0.1").write_bytes(b"x" * 47)
    (directory / NORM / "0").write_bytes(b"x" * 21)
    assert_unreadable(
        tmp_path,
        "is not whole",
        f"{NORM}/0 has 21 of 20 bytes",
        f"{EMBEDDING}/0.1 has 47 of 48 bytes",
        f"{EMBEDDING}/1.0 is missing",
    )
    with pytest.raises(UnreadableCheckpoint) as error:
        zarr.open_zarr(tmp_path).check_whole()
    assert "`fill_value`" in str(error.value.hint)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("compressor", {"id": "blosc"}, "its `compressor` is {'id': 'blosc'}"),
        ("filters", [{"id": "delta"}], "its `filters` is [{'id': 'delta'}]"),
        ("order", "F", "its `order` is 'F'"),
        ("zarr_format", 3, "its `zarr_format` is 3"),
        ("dimension_separator", "", "its `dimension_separator` is ''"),
        ("dtype", ">f4", "its `dtype` is '>f4'"),
        ("dtype", [["a", "<f4"]], "its `dtype` is [['a', '<f4']]"),
        ("shape", [5, 1], "its `shape` is [5, 1], and its `chunks` are [5]"),
        ("chunks", None, "its `shape` is [5], and its `chunks` are None"),
        ("chunks", [0], "its shape [5] cannot be cut into chunks of [0]"),
        ("chunks", [2.5], "its shape [5] cannot be cut into chunks of [2.5]"),
        ("shape", [10**12], "its shape [1000000000000] cannot be cut into chunks of [5]"),
    ],
)
def test_what_is_not_stored_plainly_is_refused(field: str, value: Any, reason: str, tmp_path: Path) -> None:
    directory = tiny(tmp_path)
    file = directory / NORM / ".zarray"
    file.write_text(json.dumps({**json.loads(file.read_text()), field: value}))
    assert_unreadable(tmp_path, "not stored as Megatron writes them", f"{NORM}: {reason}")


def test_a_damaged_array_is_named(tmp_path: Path) -> None:
    file = tiny(tmp_path) / NORM / ".zarray"
    file.write_text("{")
    assert_unreadable(tmp_path, r"\.zarray` is not JSON")


def test_a_checkpoint_without_a_model_is_refused(tmp_path: Path) -> None:
    save_zarr(tmp_path, {"optimizer.state.exp_avg.x": torch.zeros(2)}, {})
    with pytest.raises(UnreadableCheckpoint, match="no GPT model"):
        zarr.open_zarr(tmp_path)


def test_a_checkpoint_is_one_of_torch_dist_to_the_rest(tmp_path: Path) -> None:
    tiny(tmp_path)
    assert isinstance(zarr.open_zarr(tmp_path), TorchDistCheckpoint)
