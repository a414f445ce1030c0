"""Large checkpoints for the benchmarks, written byte by byte: no model is built, and memory stays small."""

from __future__ import annotations

import json
import math
import os
import pickle
import shutil
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from mcore_convert.formats.request import Reservation

# Llama 3.2-1B, 1.24 billion parameters: in transformers 4's spelling, as on the Hub.
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0",
    "use_cache": True,
    "vocab_size": 128256,
}

BLOCK = 1 << 24  # elements of the random block that tensors are filled from, each from another offset


def llama_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor of a Llama's Hugging Face checkpoint, in the order of the model."""
    hidden, ffn, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads = config["num_attention_heads"] * config["head_dim"]
    groups = config["num_key_value_heads"] * config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(config["num_hidden_layers"]):
        weights = {
            "self_attn.q_proj": (heads, hidden),
            "self_attn.k_proj": (groups, hidden),
            "self_attn.v_proj": (groups, hidden),
            "self_attn.o_proj": (hidden, heads),
            "mlp.gate_proj": (ffn, hidden),
            "mlp.up_proj": (ffn, hidden),
            "mlp.down_proj": (hidden, ffn),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in weights.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def nbytes_of(shape: tuple[int, ...]) -> int:
    """Return the bytes of a bfloat16 tensor."""
    return 2 * math.prod(shape)


def llama_nbytes(config: dict[str, Any]) -> int:
    """Return the bytes of all tensors of a Llama in bfloat16."""
    return sum(map(nbytes_of, llama_shapes(config).values()))


Bits = np.ndarray[Any, np.dtype[np.uint16]]


def random_bfloat16(count: int, seed: int = 0) -> Bits:
    """Return the bits of finite numbers between 2**-15 and 1, of both signs."""
    random = np.random.default_rng(seed)
    sign_and_mantissa = random.integers(0, 1 << 16, count, dtype=np.uint16) & np.uint16(0x807F)
    exponent = random.integers(112, 127, count, dtype=np.uint16) << np.uint16(7)
    bits: Bits = sign_and_mantissa | exponent
    return bits


def make_llama(path: Path, config: dict[str, Any], *, shards: int = 2, sparse: bool = False, seed: int = 0) -> Path:
    """Write a bfloat16 Llama as a Hugging Face directory."""
    return make_hf(path, config, llama_shapes(config), shards=shards, sparse=sparse, seed=seed)


WIDTHS = {"BF16": 2, "F8_E4M3": 1, "F32": 4}  # bytes of an element, by the code in safetensors


def make_hf(
    path: Path,
    config: dict[str, Any],
    shapes: dict[str, tuple[int, ...]],
    *,
    shards: int,
    sparse: bool = False,
    seed: int = 0,
    codes: Mapping[str, str] = MappingProxyType({}),
) -> Path:
    """Write tensors as a Hugging Face directory, in bfloat16 except those with a code of another dtype.

    `sparse` leaves holes for values: zeros, without disk space. Tensors of another dtype need it.
    """
    path.mkdir(parents=True)
    names = list(shapes)
    sizes = {name: math.prod(shape) * WIDTHS[codes.get(name, "BF16")] for name, shape in shapes.items()}
    total = sum(sizes.values())
    weight_map = {}
    done = 0
    for name in names:
        weight_map[name] = f"model-{min(done * shards // total, shards - 1) + 1:05}-of-{shards:05}.safetensors"
        done += sizes[name]
    block = None if sparse else random_bfloat16(BLOCK, seed)
    for file in dict.fromkeys(weight_map.values()):
        held = {name: shapes[name] for name in names if weight_map[name] == file}
        _write_safetensors(path / file, held, block, codes)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (path / "config.json").write_text(json.dumps(config, indent=2))
    generation = {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"]}
    (path / "generation_config.json").write_text(json.dumps(generation))
    return path


def _write_safetensors(
    file: Path, shapes: dict[str, tuple[int, ...]], block: Bits | None, codes: Mapping[str, str]
) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        code = codes.get(name, "BF16")
        begin, end = end, end + math.prod(shape) * WIDTHS[code]
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        if block is None:
            out.truncate(8 + len(text) + end)
            return
        for position, shape in enumerate(shapes.values()):
            start = 4099 * position % (len(block) // 2)  # no two tensors of a model are equal
            left = nbytes_of(shape) // 2
            while left:
                piece = block[start : start + left]
                out.write(piece.data)
                left -= len(piece)
                start = 0


def write_headers(reservation: Reservation) -> None:
    """Write the files that a conversion writes before any tensor: small ones, and large ones with holes for values."""
    for path, size in reservation.sizes.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.truncate(size)
    for path, at, content in reservation.literals:
        with path.open("r+b") as file:
            os.pwrite(file.fileno(), content, at)
    for path, content in reservation.texts.items():
        path.write_bytes(content)
    for path, source in reservation.carried.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, path)


METADATA_TP = 128  # chunks along the tensor-parallel axis: the entries of a checkpoint of many ranks
METADATA_HIDDEN, METADATA_FFN, METADATA_VOCAB = 2048, 8192, 128256 - 128256 % METADATA_TP


def make_metadata(path: Path, entries: int) -> Path:
    """Write a `torch_dist` Llama with at least `entries` chunks: real metadata, and one sparse file for the bytes."""
    import torch

    layers = -(-entries // (5 * METADATA_TP + 2))
    release = path / "release"
    release.mkdir(parents=True)
    metadata, size = _metadata(layers)
    with (release / ".metadata").open("wb") as out:
        pickle.dump(metadata, out)
    with (release / "__0_0.distcp").open("wb") as out:
        out.truncate(size)
    backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (release / "metadata.json").write_text(
        json.dumps(backend | {"common_backend": "torch", "common_backend_version": 1})
    )
    common = {"args": _arguments(layers), "checkpoint_version": 3.0, "iteration": 0}
    torch.save(common, release / "common.pt")
    (path / "latest_checkpointed_iteration.txt").write_text("release")
    return path


def _arguments(layers: int) -> Namespace:
    """Return the arguments that Megatron-LM stores, as far as they define the model."""
    import torch

    return Namespace(
        num_layers=layers,
        hidden_size=METADATA_HIDDEN,
        ffn_hidden_size=METADATA_FFN,
        num_attention_heads=METADATA_TP,
        num_query_groups=METADATA_TP,
        group_query_attention=False,
        kv_channels=METADATA_HIDDEN // METADATA_TP,
        max_position_embeddings=8192,
        seq_length=8192,
        vocab_size=METADATA_VOCAB,
        padded_vocab_size=METADATA_VOCAB,
        make_vocab_size_divisible_by=128,
        normalization="RMSNorm",
        norm_epsilon=1e-5,
        swiglu=True,
        position_embedding_type="rope",
        rotary_base=500000,
        rotary_percent=1.0,
        add_bias_linear=False,
        add_qkv_bias=False,
        untie_embeddings_and_output_weights=True,
        tensor_model_parallel_size=METADATA_TP,
        pipeline_model_parallel_size=1,
        params_dtype=torch.bfloat16,
        bf16=True,
        fp16=False,
    )


def _chunks(layers: int) -> Iterator[tuple[str, tuple[int, ...], int | None]]:
    """Yield key, shape and cut dimension of every weight of a Llama with stacked layers."""
    hidden, ffn, vocab = METADATA_HIDDEN, METADATA_FFN, METADATA_VOCAB
    layer = "decoder.layers."
    yield "embedding.word_embeddings.weight", (vocab, hidden), 0
    yield layer + "self_attention.linear_qkv.layer_norm_weight", (layers, hidden), None
    yield layer + "self_attention.linear_qkv.weight", (layers, 3 * hidden, hidden), 1
    yield layer + "self_attention.linear_proj.weight", (layers, hidden, hidden), 2
    yield layer + "mlp.linear_fc1.layer_norm_weight", (layers, hidden), None
    yield layer + "mlp.linear_fc1.weight", (layers, 2 * ffn, hidden), 1
    yield layer + "mlp.linear_fc2.weight", (layers, hidden, ffn), 2
    yield "decoder.final_layernorm.weight", (hidden,), None
    yield "output_layer.weight", (vocab, hidden), 0


def _metadata(layers: int) -> tuple[Any, int]:
    """Return the `.metadata` object and the size of the file that it describes."""
    import torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
    )

    state: dict[str, Any] = {}
    storage: dict[Any, Any] = {}
    end = 0
    for key, shape, dim in _chunks(layers):
        # fc1 holds gate and up, which are cut separately: twice as many chunks
        parts = METADATA_TP * (2 if "linear_fc1.weight" in key else 1)
        chunks = []
        for layer in range(layers if key.startswith("decoder.layers.") else 1):
            for part in range(1 if dim is None else parts):
                sizes, offsets = list(shape), [0] * len(shape)
                if key.startswith("decoder.layers."):
                    sizes[0], offsets[0] = 1, layer
                if dim is not None:
                    sizes[dim] //= parts
                    offsets[dim] = part * sizes[dim]
                chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
                length = nbytes_of(tuple(sizes)) + 1536  # the bytes that `torch.save` puts around those of a tensor
                storage[MetadataIndex(key, chunk.offsets)] = _StorageInfo("__0_0.distcp", end, length)
                chunks.append(chunk)
                end += length
        properties = TensorProperties(dtype=torch.bfloat16)
        state[key] = TensorStorageMetadata(properties, torch.Size(shape), chunks)
    return Metadata(state, storage_data=storage, storage_meta=StorageMeta(save_id="benchmark")), end


def free_bytes(path: Path) -> int:
    """Return the bytes that this user may still write below `path`; in memory for a `tmpfs`."""
    stat = os.statvfs(path)
    return stat.f_bavail * stat.f_frsize
