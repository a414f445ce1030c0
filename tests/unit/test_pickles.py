"""Files that try to run code, damaged files, and torch as the oracle of our reader and writer."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import pickle
import resource
import shutil
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from torch.distributed import checkpoint as torch_dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from mcore_convert import convert
from mcore_convert.errors import ConvertError, UnreadableCheckpoint
from mcore_convert.formats.files import pickles
from mcore_convert.formats.files import safetensors as safetensors_file
from mcore_convert.formats.files import torch_archive as torch_file
from mcore_convert.formats.files.torch_archive import TorchFile
from mcore_convert.formats.torch_dist import dcp
from mcore_convert.spec.config.arguments import TorchDtype
from mcore_convert.spec.shard import Box
from mcore_convert.storage.elements import Files
from mcore_convert.storage.views import TensorMeta, View
from tests.conftest import HfMaker
from tests.refusals import refusal

SMALL = {"num_hidden_layers": 2}


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    """A file that claims to be huge must not take the machine with it."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**31, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


# Pickles that try to run code


class Calls:
    """Pickles as a call of any function."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


def named(module: str, name: str, argument: bytes = pickle.NONE) -> bytes:
    """A pickle of protocol 4 that calls a name, which may have dots, with one argument."""
    names = b"".join(pickle.SHORT_BINUNICODE + bytes([len(word)]) + word.encode() for word in (module, name))
    return pickle.PROTO + b"\x04" + names + pickle.STACK_GLOBAL + argument + pickle.TUPLE1 + pickle.REDUCE + pickle.STOP


def legacy(module: str, name: str) -> bytes:
    """The same in protocol 0, as INST."""
    return f"(S'touch executed'\ni{module}\n{name}\n.".encode()


HOSTILE: dict[str, bytes] = {
    "posix.system": pickle.dumps(Calls(os.system, "touch executed")),
    "os.system": legacy("os", "system"),
    "builtins.eval": pickle.dumps(Calls(eval, "open('executed', 'w')")),
    "builtins.exec": pickle.dumps(Calls(exec, "open('executed', 'w')"), protocol=2).replace(
        b"__builtin__", b"builtins"
    ),
    "__builtin__.exec": pickle.dumps(Calls(exec, "open('executed', 'w')"), protocol=2),
    "builtins.getattr": named("builtins", "getattr"),
    "io.open": pickle.dumps(Calls(open, "executed", "w")),
    "builtins.__import__": named("builtins", "__import__"),
    "subprocess.Popen": named("subprocess", "Popen"),
    "importlib.import_module": named("importlib", "import_module"),
    "functools.partial": named("functools", "partial"),
    "operator.attrgetter": named("operator", "attrgetter"),
    "torch.load": named("torch", "load"),
    "torch.serialization.os.system": named("torch", "serialization.os.system"),
    "torch._utils._rebuild_tensor_v2.__globals__": named("torch._utils", "_rebuild_tensor_v2.__globals__"),
    "collections.OrderedDict.fromkeys": named("collections", "OrderedDict.fromkeys"),
    "argparse.os.system": named("argparse", "os.system"),
    "argparse.FileType": named("argparse", "FileType"),
    "torch.storage._load_from_bytes": named("torch.storage", "_load_from_bytes"),
    "torch.hub.load": named("torch.hub", "load"),
    "pathlib.Path": named("pathlib", "Path"),
    "copyreg._reconstructor": named("copyreg", "_reconstructor"),
    "mcore_convert.formats.files.pickles.load": named("mcore_convert.formats.files.pickles", "load"),
}


def archive(data: bytes) -> bytes:
    """A torch file whose object is this pickle."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name, content in (("data.pkl", data), ("byteorder", b"little"), ("version", b"3\n")):
            file.writestr(f"archive/{name}", content)
    return buffer.getvalue()


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory, hf_checkpoint: HfMaker) -> Path:
    path = tmp_path_factory.mktemp("converted") / "megatron"
    convert(hf_checkpoint("llama-gqa", tokenizer=False, config=SMALL), path)
    return path


def in_metadata(path: Path, data: bytes) -> None:
    (path / "release" / ".metadata").write_bytes(data)


def in_common(path: Path, data: bytes) -> None:
    (path / "release" / "common.pt").write_bytes(archive(data))


def in_an_object(path: Path, data: bytes) -> None:
    """In the object `common_state`, which is read where there is no `common.pt`."""
    folder = path / "release"
    (folder / "common.pt").unlink()
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    index = next(index for index in metadata.storage_data if index.fqn == "common_state/shard_0_1")
    _append(folder, metadata, index, archive(data))


def in_a_chunk(path: Path, data: bytes) -> None:
    folder = path / "release"
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    index = next(index for index in metadata.storage_data if index.fqn == "decoder.final_layernorm.weight")
    _append(folder, metadata, index, archive(data))


def _append(folder: Path, metadata: Any, index: Any, content: bytes) -> None:
    with (folder / "__0_0.distcp").open("ab") as file:
        info = metadata.storage_data[index]
        info.offset, info.length = file.tell(), len(content)
        file.write(content)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("place", [in_metadata, in_common, in_an_object, in_a_chunk])
def test_code_in_a_megatron_checkpoint_is_refused_by_name(
    name: str, place: Callable[[Path, bytes], None], converted: Path, tmp_path: Path
) -> None:
    source = Path(shutil.copytree(converted, tmp_path / "SRC"))
    place(source, HOSTILE[name])
    _assert_refused(name, source)


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("wrap", [archive, bytes], ids=["zip", "legacy"])
def test_code_in_a_pickled_model_is_refused_by_name(
    name: str, wrap: Callable[[bytes], bytes], hf_checkpoint: HfMaker, tmp_path: Path
) -> None:
    source = tmp_path / "SRC"
    source.mkdir()
    shutil.copy(hf_checkpoint("llama-gqa", tokenizer=False, config=SMALL) / "config.json", source)
    (source / "pytorch_model.bin").write_bytes(wrap(HOSTILE[name]))
    _assert_refused(name, source)


def _assert_refused(name: str, source: Path) -> None:
    shown = refusal(source)
    assert shown.startswith(f"error: a pickle names `{name}`, which no checkpoint needs, in `SRC/"), shown
    assert shown.endswith("\nhint: this file may try to run code; it was not loaded\n")
    assert not Path("executed").exists()


def build(*parts: bytes) -> bytes:
    return pickle.PROTO + b"\x02" + b"".join(parts) + pickle.STOP


def glob(module: str, name: str) -> bytes:
    return pickle.GLOBAL + f"{module}\n{name}\n".encode()


def value(content: Any) -> bytes:
    """The opcodes of a plain value."""
    return pickle.dumps(content, protocol=2)[2:-1]


REBUILD = glob("torch._utils", "_rebuild_tensor_v2")
STORAGE = (
    (pickle.MARK + value("storage") + glob("torch", "FloatStorage") + value("0") + value("cpu") + value(4))
    + pickle.TUPLE
    + pickle.BINPERSID
)


def tensor(storage: bytes, *args: Any) -> bytes:
    return build(REBUILD, pickle.MARK, storage, *map(value, args), pickle.TUPLE, pickle.REDUCE)


# Allowed names with arguments that nobody would write.
ODD: dict[str, bytes] = {
    "bytes from a number": build(glob("builtins", "bytearray"), value((10**13,)), pickle.REDUCE),
    "another codec": build(glob("_codecs", "encode"), value(("x", "rot13")), pickle.REDUCE),
    "a tensor of no storage": tensor(value("x"), 0, (4,), (1,), False, {}),
    "half a size": tensor(STORAGE, 0, (4.0,), (1,), False, {}),
    "a negative size": tensor(STORAGE, 0, (-4,), (1,), False, {}),
    "a negative stride": tensor(STORAGE, 3, (4,), (-1,), False, {}),
    "a negative offset": tensor(STORAGE, -1, (4,), (1,), False, {}),
    "more than the storage": tensor(STORAGE, 1, (4,), (1,), False, {}),
    "a huge stride": tensor(STORAGE, 0, (4,), (2**62,), False, {}),
    "two sizes and a stride": tensor(STORAGE, 0, (2, 2), (1,), False, {}),
    "a storage that is not there": tensor(STORAGE.replace(value("0"), value("7")), 0, (4,), (1,), False, {}),
    "a storage beyond the file": tensor(STORAGE.replace(value(4), value(2**40)), 0, (4,), (1,), False, {}),
    "a storage of minus four": tensor(STORAGE.replace(value(4), value(-4)), 0, (4,), (1,), False, {}),
    "no storage at all": build(value(("storage",)), pickle.BINPERSID),
    "a call of a number": build(value(1), value((1,)), pickle.REDUCE),
    "a size of text": build(glob("torch", "Size"), value((7,)), pickle.REDUCE),
    "an unknown extension": build(pickle.EXT1 + b"\x07"),
    "a string of 2**62 bytes": pickle.PROTO + b"\x04" + pickle.BINBYTES8 + struct.pack("<Q", 2**62) + b"x.",
    "text of 2**31 bytes": pickle.PROTO + b"\x04" + pickle.BINUNICODE + struct.pack("<I", 2**31 - 1) + b"x.",
    "a memo of 2**31": build(value(1), pickle.LONG_BINPUT + struct.pack("<I", 2**31 - 1)),
    "a frame of 2**62 bytes": pickle.PROTO + b"\x04" + pickle.FRAME + struct.pack("<Q", 2**62) + b"N.",
    "a number of too many digits": b"I" + b"9" * 10**5 + b"\n.",
    "nothing on the stack": build(pickle.REDUCE),
    "no end": pickle.PROTO + b"\x04N",
    "depth": build(pickle.EMPTY_LIST * 10**5, pickle.APPEND * (10**5 - 1)),
}


@pytest.mark.parametrize("name", ODD)
def test_hostile_arguments_are_refused(name: str, tmp_path: Path) -> None:
    file = tmp_path / "file.pt"
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as opened:
        opened.writestr("archive/data.pkl", ODD[name])
        opened.writestr("archive/data/0", bytes(16))
    file.write_bytes(buffer.getvalue())
    with pytest.raises(UnreadableCheckpoint):
        TorchFile(file)
    (tmp_path / ".metadata").write_bytes(ODD[name])
    with pytest.raises(UnreadableCheckpoint):
        dcp.read(tmp_path)


def test_parts_that_hold_themselves_are_refused(tmp_path: Path) -> None:
    tree: list[Any] = [1]
    tree.append(tree)
    bomb: list[Any] = []
    for _ in range(100):
        bomb = [bomb, bomb]
    twice: list[Any] = [1]
    file = tmp_path / "file.pt"
    for part, reason in ((tree, "holds itself"), (bomb, "the same parts again and again")):
        file.write_bytes(archive(pickle.dumps({"part": part})))
        with pytest.raises(UnreadableCheckpoint, match=reason):
            TorchFile(file)
    file.write_bytes(archive(pickle.dumps([twice, twice])))
    found = TorchFile(file).tree
    assert found[0] is found[1]


def test_a_pickle_cannot_change_what_the_next_one_is_given(tmp_path: Path) -> None:
    """The opcode BUILD sets attributes of whatever the reader hands out, so it hands out copies."""
    changes = [
        (glob("torch", "FloatStorage"), {"dtype": "int8"}),
        (glob("torch", "float32"), {"name": "int8"}),
        (glob("torch._utils", "_rebuild_tensor_v2"), {"changed": 1}),
        (glob("argparse", "Namespace"), (None, {"changed": 1})),
        (glob("torch.distributed.checkpoint.metadata", "Metadata"), (None, {"changed": 1})),
        (glob("torch.distributed.checkpoint.metadata", "MetadataIndex"), (None, {"__hash__": None})),
    ]
    for target, state in changes:
        with contextlib.suppress(UnreadableCheckpoint):
            pickles.load(io.BytesIO(build(target, value(state), pickle.BUILD)), "`x`")
    file = tmp_path / "file.pt"
    torch.save({"x": torch.ones(3), "args": argparse.Namespace(dtype=torch.float32)}, file)
    found = TorchFile(file).tree
    assert found["x"].dtype == "float32"
    assert found["args"].dtype == TorchDtype("float32")
    assert not hasattr(argparse.Namespace, "changed")
    assert not hasattr(pickles.Metadata, "changed")
    assert not hasattr(pickles._rebuild_tensor, "changed")
    assert pickles.MetadataIndex.__hash__ is not None


def test_stand_ins_run_nothing() -> None:
    for module, name in [("numpy", "load"), ("numpy.testing._private.utils", "runstring"), ("megatron.x", "y")]:
        found = pickles.load(io.BytesIO(named(module, name)), "`x`")
        assert isinstance(found, pickles.StandIn)
        assert found.arguments == (None,)


# Damage at random


@cache
def samples() -> dict[str, tuple[bytes, Callable[[Path], object]]]:
    """Valid files of every kind, and what reads them."""
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16), "n": 3}

    def saved(content: object, **options: Any) -> bytes:
        buffer = io.BytesIO()
        torch.save(content, buffer, **options)
        return buffer.getvalue()

    meta = TensorMeta((2, 3), "float32")
    laid = torch_file.lay_out(lambda refs: refs[0], [meta])
    chunk = bytearray(laid.size)
    for at, content in laid.literals:
        chunk[at : at + len(content)] = content
    place = dcp.Place("__0_0.distcp", 0, laid.size)
    ours = dcp.metadata_bytes({"w": meta}, {"w": [dcp.Chunk(Box.whole((2, 3)), place)]}, {"o": place})
    theirs = pickle.dumps(pickle.loads(ours))
    common = torch_file.dumps({"args": argparse.Namespace(num_layers=2, dtype=TorchDtype("bfloat16")), "iteration": 3})

    def read_metadata(path: Path) -> None:
        (path.parent / ".metadata").write_bytes(path.read_bytes())
        directory = dcp.read(path.parent)
        (path.parent / "__0_0.distcp").write_bytes(chunk)
        directory.check(directory.tensors)
        for key in directory.tensors:
            directory.slots(key)

    return {
        "metadata.ours": (ours, read_metadata),
        "metadata.torch": (theirs, read_metadata),
        "chunk": (bytes(chunk), TorchFile),
        "common": (common, TorchFile),
        "zip": (saved(tensors), TorchFile),
        "legacy": (saved(tensors, _use_new_zipfile_serialization=False), TorchFile),
        "safetensors": (_safetensors(), safetensors_file.read),
    }


def _safetensors() -> bytes:
    content: bytes = save({"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)})
    return content


@pytest.mark.parametrize("kind", ["metadata.ours", "metadata.torch", "chunk", "common", "zip", "legacy", "safetensors"])
@settings(max_examples=150, deadline=5000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.slow
def test_damage_is_refused_or_harmless(kind: str, data: st.DataObject, tmp_path: Path) -> None:
    """Flipped bytes and lost ends either load or are refused: nothing else is raised, and nothing hangs."""
    whole, read = samples()[kind]
    content = bytearray(whole)
    for _ in range(data.draw(st.integers(0, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    end = data.draw(st.just(len(content)) | st.integers(0, len(content)))
    file = tmp_path / "file.safetensors"
    file.write_bytes(content[:end])
    with contextlib.suppress(ConvertError):
        read(file)


@pytest.mark.parametrize("kind", ["chunk", "common", "zip", "legacy", "safetensors"])
def test_every_lost_end_is_seen(kind: str, tmp_path: Path) -> None:
    whole, read = samples()[kind]
    file = tmp_path / "file.safetensors"
    file.write_bytes(whole)
    read(file)
    for size in range(0, len(whole), 7):
        file.write_bytes(whole[:size])
        with pytest.raises(UnreadableCheckpoint):
            read(file)


# torch as the oracle


def content_of(view: View) -> torch.Tensor:
    """The bytes of a view, row by row."""
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
        found = torch.load(file, weights_only=True, mmap=mmap)
        assert found["n"] == 3
        for mine, theirs in zip(tensors, found["list"], strict=True):
            assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
            assert torch.equal(mine.reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8))
    assert [tree.shape for tree in TorchFile(file).tree["list"]] == shapes


def test_torch_reads_our_metadata(tmp_path: Path) -> None:
    """A tensor in two chunks in two files, through torch's own reader."""
    meta, parts = TensorMeta((4, 3), "bfloat16"), [Box((0, 0), (2, 3)), Box((2, 0), (2, 3))]
    whole = torch.arange(12).view(4, 3).bfloat16()
    found = []
    for number, box in enumerate(parts):
        laid = torch_file.lay_out(lambda refs: refs[0], [TensorMeta(box.sizes, meta.dtype)])
        content = bytearray(64 + laid.size)
        for at, literal in laid.literals:
            content[64 + at : 64 + at + len(literal)] = literal
        raw = whole[2 * number : 2 * number + 2].contiguous().view(torch.uint8).numpy().tobytes()
        content[64 + laid.holes[0] : 64 + laid.holes[0] + len(raw)] = raw
        (tmp_path / f"__{number}_0.distcp").write_bytes(content)
        found.append(dcp.Chunk(box, dcp.Place(f"__{number}_0.distcp", 64, laid.size)))
    (tmp_path / ".metadata").write_bytes(dcp.metadata_bytes({"w": meta}, {"w": found}, {}))
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
