"""Makes `corpus/`: tiny checkpoints, and small files of each kind. `python -m tests.fuzz.make_corpus`, from the root.

The files are kept in the repository, so that the fuzzers need neither torch nor Megatron Core, and every run of them
begins at the same ones.
"""

from __future__ import annotations

import json
import shutil
import struct
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch

from fixtures.fsdp_dtensor import save_fsdp_dtensor
from fixtures.hf import make_hf
from fixtures.megatron import random_weights
from fixtures.mp_rank import save_mp_rank
from fixtures.optimizer import random_state, save_with_optimizer
from fixtures.ranks import run_ranks
from fixtures.zarr import zarr_of
from mcore_convert import convert

CORPUS = Path(__file__).parent / "corpus"
ARGS: dict[str, Any] = {
    "num_layers": 1,
    "hidden_size": 8,
    "ffn_hidden_size": 8,
    "num_attention_heads": 2,
    "group_query_attention": True,
    "num_query_groups": 1,
    "kv_channels": 4,
    "max_position_embeddings": 8,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "swiglu": True,
    "untie_embeddings_and_output_weights": True,
    "padded_vocab_size": 16,
}
CONFIG = {
    "vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 8,
}  # fmt: skip


def main() -> None:
    """Make all of it anew."""
    shutil.rmtree(CORPUS, ignore_errors=True)
    (CORPUS / "checkpoints").mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        checkpoints(here)
        for path in sorted(here.iterdir()):
            pack(path, CORPUS / "checkpoints" / f"{path.name}.zip")
        files(here)


def checkpoints(here: Path) -> None:
    """Make one of each format, with and without optimizer state."""
    make_hf("llama-gqa", here / "hf", tokenizer=False, config=CONFIG)
    make_hf("llama-gqa", here / "hf_shards", tokenizer=False, config=CONFIG, shards=2)
    make_hf("llama-gqa", here / "hf_bin", tokenizer=False, config=CONFIG, file_format="bin")
    convert(here / "hf", here / "dist", tp=2)
    convert(here / "hf", here / "ranks", to="torch", tp=2)
    state = random_state(ARGS)
    run_ranks(2, lambda: save_with_optimizer(ARGS, state, here / "dist_state", "fully_reshardable", tp=2))
    run_ranks(1, lambda: save_with_optimizer(ARGS, state, here / "dist_plain", "plain", dtype=torch.float32))
    for kind in ("plain", "distributed"):
        save = {"optimizer": kind, "tp": 2, "dtype": torch.bfloat16}
        run_ranks(2, lambda save=save, kind=kind: save_mp_rank(ARGS, state, here / f"ranks_{kind}", **save))
    run_ranks(2, lambda: save_fsdp_dtensor(ARGS, state, here / "fsdp"))
    (source,) = (here / "dist_plain").glob("iter_*")
    zarr_of(source, here / "zarr", split={"linear_qkv.weight": 2})


def pack(path: Path, archive: Path) -> None:
    """Pack a directory as a zip file whose bytes depend on nothing else."""
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packed:
        for file in sorted(each for each in path.rglob("*") if each.is_file()):
            packed.writestr(zipfile.ZipInfo(str(file.relative_to(path))), file.read_bytes(), zipfile.ZIP_DEFLATED)


def files(here: Path) -> None:
    """Make what the parsers of single files begin at."""

    def keep(target: str, name: str, content: bytes) -> None:
        (CORPUS / target).mkdir(exist_ok=True)
        (CORPUS / target / name).write_bytes(content)

    safetensors = (here / "hf" / "model.safetensors").read_bytes()
    keep("safetensors", "model", safetensors)
    small = json.dumps({"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}).encode()
    keep("safetensors", "small", struct.pack("<Q", len(small)) + small + bytes(16))
    keep("config", "llama", (here / "hf" / "config.json").read_bytes())
    keep("index", "shards", (here / "hf_shards" / "model.safetensors.index.json").read_bytes())
    keep("metadata", "ours", next((here / "dist").rglob(".metadata")).read_bytes())
    keep("metadata", "megatron", next((here / "dist_state").rglob(".metadata")).read_bytes())
    chunk = tree({"weight": torch.zeros(2, 2)}["weight"], here)
    keep("archive", "chunk", chunk)
    keep("archive", "common", next((here / "dist").rglob("common.pt")).read_bytes())
    keep(
        "archive", "state_dict", tree({"a.weight": torch.zeros(2, 2), "b": torch.zeros(3, dtype=torch.bfloat16)}, here)
    )
    keep("legacy", "state_dict", tree({"a.weight": torch.zeros(2, 2)}, here, new=False))
    keep(
        "legacy", "nested", tree({"args": {"n": [1, 2.5, "x"]}, "t": torch.ones(2, dtype=torch.int64)}, here, new=False)
    )
    with zipfile.ZipFile(next((here / "dist").rglob("common.pt"))) as archive:
        keep("pickle", "common", archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl"))))
    keep("zarray", "array", next((here / "zarr").rglob(".zarray")).read_bytes())
    keep("tracker", "iteration", b"10")
    keep("tracker", "release", b"release\n")
    lengths = (3, 2)
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 4, 2, 3) + struct.pack("<2i2q3q", *lengths, 0, 12, 0, 1, 2)
    keep("idx", "two", head)
    keep(
        "run_file",
        "run",
        b"defaults: [tiny-gpt2, _self_]\ntraining: {steps: 10, seq_length: 8}\nmodel: &m {a: [1, 2]}\n",
    )
    keep("metrics", "rows", b'{"iteration": 1, "loss": 4.5}\n{"iteration": 2, "loss": 4.25, "evaluation": "test"}\n')
    keep("sentencepiece", "pieces", b"\n\x07\n\x03<s>\x18\x03\n\x05\n\x01a\x18\x01")
    vocabulary = {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []},
                  "added_tokens": [{"id": 2, "content": "<s>", "special": True}]}  # fmt: skip
    keep("tokenizer", "bpe", json.dumps(vocabulary).encode())


def tree(content: Any, here: Path, *, new: bool = True) -> bytes:
    """Return the bytes of `torch.save`."""
    torch.save(content, here / "x.pt", _use_new_zipfile_serialization=new)
    return (here / "x.pt").read_bytes()


if __name__ == "__main__":
    random_weights(ARGS)  # imports Megatron Core, before ranks are forked
    main()
