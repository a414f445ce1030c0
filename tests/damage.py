"""Damage to a tiny checkpoint, one kind at a time, for tests of refusals."""

from __future__ import annotations

import argparse
import dataclasses
import json
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from mcore_convert.formats.files import torch_archive as torch_file
from mcore_convert.formats.files.torch_archive import TorchFile

Tensors = dict[str, torch.Tensor]


SMALL = {"num_hidden_layers": 2}


WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


ITERATION = "release"


Q = "model.layers.1.self_attn.q_proj.weight"


def edit_json(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def edit_tensors(path: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(path / WEIGHTS)
    change(tensors)
    save_file(tensors, path / WEIGHTS)


def edit_header(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the header of a safetensors file; the data stays."""
    raw = file.read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


def cut(file: Path, size: int) -> None:
    with file.open("r+b") as opened:
        opened.truncate(size if size >= 0 else file.stat().st_size + size)


# Damage to a Hugging Face directory: to which kind of checkpoint, and what is done.

Damage = Callable[[Path], object]


ONE: dict[str, Any] = {}


TWO = {"shards": 2}


FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def hf_config(**fields: Any) -> Damage:
    return lambda path: edit_json(path / "config.json", lambda config: config.update(fields))


def hf_tensors(change: Callable[[Tensors], object]) -> Damage:
    return lambda path: edit_tensors(path, change)


def hf_header(change: Callable[[dict[str, Any]], object]) -> Damage:
    return lambda path: edit_header(path / WEIGHTS, change)


def hf_index(change: Callable[[dict[str, Any]], object]) -> Damage:
    return lambda path: edit_json(path / INDEX, change)


def truncated(size: int) -> Damage:
    return lambda path: cut(path / WEIGHTS, size)


def moved_by(start: int, end: int) -> Damage:
    """Return the data of one tensor begins and ends elsewhere."""

    def change(header: dict[str, Any]) -> None:
        low, high = header["model.norm.weight"]["data_offsets"]
        header["model.norm.weight"]["data_offsets"] = [low + start, high + end]

    return hf_header(change)


def described_as(**entry: Any) -> Damage:
    return hf_header(lambda header: header["model.norm.weight"].update(entry))


def emptied(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


def made_a_file(path: Path) -> None:
    shutil.rmtree(path)
    path.touch()


# Damage to a Megatron directory.


def metadata(change: Callable[[Any], object]) -> Damage:
    """Change `.metadata` through torch's own classes."""

    def damage(path: Path) -> None:
        file = path / ITERATION / ".metadata"
        content = pickle.loads(file.read_bytes())
        change(content)
        file.write_bytes(pickle.dumps(content))

    return damage


def chunks(change: Callable[[list[Any]], object], key: str = "decoder.layers.mlp.linear_fc2.weight") -> Damage:
    return metadata(lambda content: change(content.state_dict_metadata[key].chunks))


def storage(**fields: Any) -> Damage:
    """Another place for one chunk."""

    def change(content: Any) -> None:
        index = next(index for index in content.storage_data if index.fqn == "decoder.final_layernorm.weight")
        content.storage_data[index] = dataclasses.replace(content.storage_data[index], **fields)

    return metadata(change)


def first_chunk(**fields: Any) -> Damage:
    def change(result: list[Any]) -> None:
        result[0] = dataclasses.replace(result[0], **fields)

    return chunks(change)


def drop_place(content: Any) -> None:
    for index in [index for index in content.storage_data if index.fqn == "decoder.final_layernorm.weight"]:
        del content.storage_data[index]


def stored_args(*drop: str, **fields: Any) -> Damage:
    """Other arguments in `common.pt`."""

    def damage(path: Path) -> None:
        file = path / ITERATION / "common.pt"
        state = TorchFile(file).tree
        args = {name: value for name, value in vars(state["args"]).items() if name not in drop} | fields
        file.write_bytes(torch_file.dumps({**state, "args": argparse.Namespace(**args)}))

    return damage


def no_args(path: Path) -> None:
    (path / ITERATION / "run_config.yaml").unlink(missing_ok=True)  # which says the same for another program
    (path / ITERATION / "common.pt").write_bytes(torch_file.dumps({"iteration": 3}))


def no_common(path: Path) -> None:
    (path / ITERATION / "common.pt").unlink()
    metadata(lambda content: content.state_dict_metadata.pop("common_state/shard_0_1"))(path)


def data_file(change: Callable[[Path], object]) -> Damage:
    return lambda path: change(path / ITERATION / "__0_0.distcp")


def overwritten(file: Path) -> None:
    """Garbage over the end of the first archive, where its directory is."""
    with file.open("r+b") as opened:
        opened.seek(opened.read(2**20).index(b"PK\x05\x06") - 40)
        opened.write(b"\xa5" * 60)


def two_chunks_swapped(content: Any) -> None:
    """Exchange the places of two chunks of different shape."""
    names = ("decoder.final_layernorm.weight", "output_layer.weight")
    one, two = (next(index for index in content.storage_data if index.fqn == name) for name in names)
    data = content.storage_data
    data[one], data[two] = data[two], data[one]


def tracker(text: str) -> Damage:
    return lambda path: (path / "latest_checkpointed_iteration.txt").write_text(text)


def text(name: str, content: str) -> Damage:
    return lambda path: (path / ITERATION / name).write_text(content)


def no_tracker(path: Path) -> None:
    (path / "latest_checkpointed_iteration.txt").unlink()


def nothing(path: Path) -> None:
    no_tracker(path)
    shutil.rmtree(path / ITERATION)
