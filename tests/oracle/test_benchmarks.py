"""The parts of the benchmark: its checkpoints are real ones, and its measures see what they should."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import AutoModelForCausalLM

from benchmarks.checkpoints import LLAMA, llama_nbytes, make_llama, make_metadata
from benchmarks.convert import Figure, roomy, table
from benchmarks.measure import CommandFailed, peak_anonymous_bytes, seconds
from benchmarks.ranks import QUARTER, make_ranks
from mcore_convert import reshard, verify
from mcore_convert.spec import Layout

SMALL: dict[str, Any] = LLAMA | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "head_dim": 16,
    "vocab_size": 300,
}


def test_the_model_has_the_published_size() -> None:
    assert llama_nbytes(LLAMA) == 2 * 1_235_814_400
    assert llama_nbytes(QUARTER) == 2 * 308_955_136


@pytest.mark.parametrize("sparse", [False, True])
def test_transformers_reads_the_model(sparse: bool, tmp_path: Path) -> None:
    path = make_llama(tmp_path / "hf", SMALL, sparse=sparse)
    model, info = AutoModelForCausalLM.from_pretrained(path, dtype="auto", output_loading_info=True)
    assert not any(info.values()), info
    tensors = list(model.state_dict().values())
    assert all(tensor.dtype == torch.bfloat16 and tensor.isfinite().all() for tensor in tensors)
    assert all(bool(tensor.any()) is not sparse for tensor in tensors)


def test_shards_agree_with_their_index(tmp_path: Path) -> None:
    path = make_llama(tmp_path / "hf", SMALL)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    held = {key: file for file in files for key in load_file(path / file)}
    assert held == index["weight_map"]


def test_metadata_is_what_torch_reads(tmp_path: Path) -> None:
    release = make_metadata(tmp_path / "dist", 2000) / "release"
    metadata = FileSystemReader(release).read_metadata()
    assert len(metadata.storage_data) >= 2000
    size = (release / "__0_0.distcp").stat().st_size
    assert max(info.offset + info.length for info in metadata.storage_data.values()) == size
    for key, tensor in metadata.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata)
        covered = sum(chunk.sizes.numel() for chunk in tensor.chunks)
        assert covered == tensor.size.numel(), key


def test_ranks_are_what_a_reshard_proves(tmp_path: Path) -> None:
    """Replicas agree and master copies round to their weights, or the reshard would refuse."""
    source = make_ranks(tmp_path / "source", SMALL, Layout(tp=2, pp=2))
    reshard(source, tmp_path / "one")
    assert verify(source, tmp_path / "one").num_weights == 4 * 14
    content = torch.load(tmp_path / "one/iter_0001000/mp_rank_00/model_optim_rng.pt", weights_only=False)
    (weight,) = (tensor for key, tensor in content["model"].items() if key == "embedding.word_embeddings.weight")
    master = content["optimizer"]["fp32_from_fp16_params"][0][0]
    assert torch.equal(master.bfloat16(), weight)
    assert (master != weight.float()).float().mean() > 0.9
    assert master.isfinite().all()


def test_memory_of_children_is_seen() -> None:
    hold = "import time; held = bytearray(100 << 20); time.sleep(0.3)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {hold!r}], check=True)"
    for code in (hold, parent):
        assert 100 << 20 < peak_anonymous_bytes([sys.executable, "-c", code]) < 150 << 20


@pytest.mark.parametrize("measure", [seconds, peak_anonymous_bytes])
def test_a_command_that_fails_says_why(measure: Any) -> None:
    with pytest.raises(CommandFailed, match="out of cheese"):
        measure([sys.executable, "-c", "raise SystemExit('out of cheese')"])


def test_the_table_says_what_was_missed() -> None:
    text = table([Figure("fast", 1.0, "s", 2.0), Figure("slow", 3.0, "s", 2.0), Figure("free", 4.0, "MiB")])
    assert [line for line in text.splitlines() if "missed" in line] == ["| slow | 3.00 s | 2.00 s | **missed** |"]


def test_no_room_is_no_place(tmp_path: Path) -> None:
    assert roomy(1 << 10, tmp_path / "absent", tmp_path) == tmp_path
    assert roomy(1 << 60, tmp_path) is None
