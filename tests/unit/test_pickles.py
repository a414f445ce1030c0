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
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from mcore_convert import convert
from mcore_convert.checkpoints.manifest import MANIFEST
from mcore_convert.errors import ConvertError, UnreadableCheckpoint
from mcore_convert.formats.files import dcp, pickles
from mcore_convert.formats.files import safetensors as safetensors_file
from mcore_convert.formats.files import torch_archive as torch_file
from mcore_convert.formats.files.dcp_metadata import metadata_bytes
from mcore_convert.formats.files.torch_archive import TorchFile
from mcore_convert.spec.config.arguments import TorchDtype
from mcore_convert.spec.shard import Box
from mcore_convert.storage.views import TensorMeta
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
    """Return a pickle of protocol 4 that calls a name, which may have dots, with one argument."""
    names = b"".join(pickle.SHORT_BINUNICODE + bytes([len(word)]) + word.encode() for word in (module, name))
    return pickle.PROTO + b"\x04" + names + pickle.STACK_GLOBAL + argument + pickle.TUPLE1 + pickle.REDUCE + pickle.STOP


def legacy(module: str, name: str) -> bytes:
    """Return the same in protocol 0, as INST."""
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
    """Return a torch file whose object is this pickle."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name, content in (("data.pkl", data), ("byteorder", b"little"), ("version", b"3\n")):
            file.writestr(f"archive/{name}", content)
    return buffer.getvalue()


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory, hf_checkpoint: HfMaker) -> Path:
    path = tmp_path_factory.mktemp("converted") / "megatron"
    convert(hf_checkpoint("llama-gqa", tokenizer=False, config=SMALL), path)
    (path / "release" / MANIFEST).unlink()  # a stranger's checkpoint has none
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
    """Return the opcodes of a plain value."""
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
    result = TorchFile(file).tree
    assert result[0] is result[1]


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
    result = TorchFile(file).tree
    assert result["x"].dtype == "float32"
    assert result["args"].dtype == TorchDtype("float32")
    assert not hasattr(argparse.Namespace, "changed")
    assert not hasattr(pickles.Metadata, "changed")
    assert not hasattr(pickles._rebuild_tensor, "changed")
    assert pickles.MetadataIndex.__hash__ is not None


def test_stand_ins_run_nothing() -> None:
    for module, name in [("numpy", "load"), ("numpy.testing._private.utils", "runstring"), ("megatron.x", "y")]:
        actual = pickles.load(io.BytesIO(named(module, name)), "`x`")
        assert isinstance(actual, pickles.StandIn)
        assert actual.arguments == (None,)


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
    ours = metadata_bytes({"w": meta}, {"w": [dcp.Chunk(Box.whole((2, 3)), place)]}, {"o": place})
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
