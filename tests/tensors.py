"""Reading checkpoints with other people's code, to compare with what ours wrote."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch


def hf_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Return every tensor of a safetensors directory, through the safetensors library,
    by its index where there is one.
    """
    from safetensors.torch import load_file

    index = path / "model.safetensors.index.json"
    if not index.is_file():
        tensors: dict[str, torch.Tensor] = load_file(path / "model.safetensors")
        return tensors
    weight_map = json.loads(index.read_text())["weight_map"]
    files = {name: load_file(path / name) for name in sorted(set(weight_map.values()))}
    assert sorted(weight_map) == sorted(key for tensors in files.values() for key in tensors)
    return {key: files[name][key] for key, name in weight_map.items()}


def assert_same_tensors(actual: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """Same names, dtypes and bytes."""
    assert sorted(actual) == sorted(wanted)
    for key, tensor in wanted.items():
        assert actual[key].dtype == tensor.dtype, key
        assert actual[key].shape == tensor.shape, key
        assert torch.equal(actual[key].view(torch.uint8), tensor.view(torch.uint8)), key


def dcp_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Return every tensor of a `torch_dist` directory, through torch.distributed.checkpoint."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    metadata = dcp.FileSystemReader(path).read_metadata()
    state: dict[str, Any] = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # that is what no_dist asks for
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.load(state, storage_reader=dcp.FileSystemReader(path), planner=planner, no_dist=True)
    return state
