"""Files of torch: what torch saves is read, and what is laid out torch loads."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed import checkpoint as torch_dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from mcore_convert.formats.files import dcp
from mcore_convert.formats.files import torch_archive as torch_file
from mcore_convert.formats.files.dcp_metadata import metadata_bytes
from mcore_convert.formats.files.torch_archive import TorchFile
from mcore_convert.spec.shard import Box
from mcore_convert.storage.elements import Files
from mcore_convert.storage.views import TensorMeta, View

# torch as the oracle


def content_of(view: View) -> torch.Tensor:
    """Return the bytes of a view, row by row."""
    with Files() as files:
        return torch.from_numpy(np.array(files.read(view)).reshape(-1).view(np.uint8))


def assert_read_as_saved(tensors: dict[str, torch.Tensor], tree: dict[str, View]) -> None:
    assert tree.keys() == tensors.keys()
    for key, tensor_ in tensors.items():
        view = tree[key]
        assert view.shape == tuple(tensor_.shape), key
        assert f"torch.{view.dtype}" == str(tensor_.dtype), key
        assert view.strides == tuple(step * tensor_.element_size() for step in tensor_.stride()), key
        plain = tensor_.detach().contiguous().reshape(-1)
        assert torch.equal(content_of(view), plain.view(torch.uint8)), key


@pytest.mark.parametrize("zipped", [True, False])
def test_what_torch_saves_is_read(zipped: bool, tmp_path: Path) -> None:
    base = torch.arange(48.0).view(6, 8)
    names = ["float64", "float32", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool"]
    tensors: dict[str, torch.Tensor] = OrderedDict((n, torch.arange(10).to(getattr(torch, n))) for n in names)
    if zipped:  # older files cannot hold these
        for name in ("float8_e4m3fn", "float8_e5m2"):
            tensors[name] = torch.arange(10.0).to(getattr(torch, name))
    tensors |= {
        "whole": base,
        "transposed": base.T,
        "rows": base[2:4],
        "every other": base[::2, 1::3],
        "expanded": base[:1].expand(5, 8),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "frozen": torch.nn.Parameter(torch.ones(3), requires_grad=False),
    }
    file = tmp_path / "file.pt"
    torch.save(tensors, file, _use_new_zipfile_serialization=zipped)
    assert_read_as_saved(tensors, TorchFile(file).tree)


def test_nested_objects_are_read(tmp_path: Path) -> None:
    file = tmp_path / "file.pt"
    one = torch.ones(2)
    torch.save({"a": [one, (one, {"b": {1, 2}})], "c": OrderedDict(d=None), "e": b"\xff", "f": torch.Size([3])}, file)
    tree = TorchFile(file).tree
    assert tree["a"][0] == tree["a"][1][0]
    assert tree["a"][1][1] == {"b": {1, 2}}
    assert (tree["c"], tree["e"], tree["f"]) == ({"d": None}, b"\xff", (3,))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int64", "bool"])
def test_torch_loads_what_is_laid_out(dtype: str, tmp_path: Path) -> None:
    shapes = [(3, 5), (), (0, 2), (7,)]
    metas = [TensorMeta(shape, dtype) for shape in shapes]
    laid = torch_file.lay_out(lambda refs: {"list": refs, "n": 3}, metas)
    tensors = [torch.arange(meta.numel).reshape(meta.shape).to(getattr(torch, dtype)) for meta in metas]
    content = bytearray(laid.size)
    for at, literal in laid.literals:
        content[at : at + len(literal)] = literal
    for at, tensor_ in zip(laid.holes, tensors, strict=True):
        raw = tensor_.reshape(-1).view(torch.uint8).numpy().tobytes()
        content[at : at + len(raw)] = raw
    file = tmp_path / "file.pt"
    file.write_bytes(content)
    for mmap in (False, True):
        actual = torch.load(file, weights_only=True, mmap=mmap)
        assert actual["n"] == 3
        for mine, theirs in zip(tensors, actual["list"], strict=True):
            assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
            assert torch.equal(mine.reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8))
    assert [tree.shape for tree in TorchFile(file).tree["list"]] == shapes


def test_torch_reads_our_metadata(tmp_path: Path) -> None:
    """A tensor in two chunks in two files, through torch's own reader."""
    meta, parts = TensorMeta((4, 3), "bfloat16"), [Box((0, 0), (2, 3)), Box((2, 0), (2, 3))]
    whole = torch.arange(12).view(4, 3).bfloat16()
    result = []
    for number, box in enumerate(parts):
        laid = torch_file.lay_out(lambda refs: refs[0], [TensorMeta(box.sizes, meta.dtype)])
        content = bytearray(64 + laid.size)
        for at, literal in laid.literals:
            content[64 + at : 64 + at + len(literal)] = literal
        raw = whole[2 * number : 2 * number + 2].contiguous().view(torch.uint8).numpy().tobytes()
        content[64 + laid.holes[0] : 64 + laid.holes[0] + len(raw)] = raw
        (tmp_path / f"__{number}_0.distcp").write_bytes(content)
        result.append(dcp.Chunk(box, dcp.Place(f"__{number}_0.distcp", 64, laid.size)))
    (tmp_path / ".metadata").write_bytes(metadata_bytes({"w": meta}, {"w": result}, {}))
    reader = torch_dcp.FileSystemReader(tmp_path)
    entry = reader.read_metadata().state_dict_metadata["w"]
    assert isinstance(entry, TensorStorageMetadata)
    assert (entry.size, entry.properties.dtype) == (torch.Size([4, 3]), torch.bfloat16)
    state = {"w": torch.zeros(4, 3, dtype=torch.bfloat16)}
    planner = torch_dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with pytest.warns(UserWarning, match=r"torch\.distributed is"):
        torch_dcp.load(state, storage_reader=torch_dcp.FileSystemReader(tmp_path), planner=planner, no_dist=True)
    assert torch.equal(state["w"], whole)
    directory = dcp.read(tmp_path)
    assert [slot.box for slot in directory.slots("w")] == parts
