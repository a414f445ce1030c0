"""The memory that a pickle takes is known before it is read: never too little, and not far too much."""

from __future__ import annotations

import argparse
import gc
import io
import pickle
import struct
import tracemalloc
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_convert.errors import UnreadableCheckpoint
from mcore_convert.formats.files import dcp, pickle_prices, pickle_walk, pickles
from mcore_convert.formats.files.dcp_metadata import metadata_bytes
from mcore_convert.formats.files.pickle_prices import Budget, TooMuch
from mcore_convert.formats.files.pickle_walk import end_of
from mcore_convert.spec.shard import Box
from mcore_convert.storage.views import TensorMeta
from tests.unit.test_pickle_budget import PROTO, STOP, function, word

N = 1200
DCP = "torch.distributed.checkpoint.metadata."


def metadata(entries: int, protocol: int = 4, *, dims: int = 3) -> bytes:
    """Return the metadata of a tensor in that many chunks, as torch pickles it."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    rest = (300,) * (dims - 1)
    chunks = [ChunkStorageMetadata(torch.Size((n, *(0,) * len(rest))), torch.Size((1, *rest))) for n in range(entries)]
    entry = TensorStorageMetadata(TensorProperties(torch.bfloat16), torch.Size((entries, *rest)), chunks)
    names = [f"__{rank}_0.distcp" for rank in range(100)]
    places = {
        MetadataIndex("w", chunk.offsets): _StorageInfo(names[n % 100], 2**33 + 4096 * n, 4096)
        for n, chunk in enumerate(chunks)
    }
    return pickle.dumps(Metadata({"w": entry}, storage_data=places), protocol)


def ours(entries: int) -> bytes:
    """Return the same as this project writes it."""
    boxes = [Box((n, 0), (1, 3)) for n in range(entries)]
    chunks = [dcp.Chunk(box, dcp.Place("__0_0.distcp", 4096 * n, 4096)) for n, box in enumerate(boxes)]
    return metadata_bytes({"w": TensorMeta((entries, 3), "float32")}, {"w": chunks}, {})


def named(count: int) -> bytes:
    return b"".join(b"cmegatron\na%d\n" % n for n in range(count))


def integers(count: int, code: bytes = b"") -> bytes:
    return b"".join(b"J" + struct.pack("<i", 2**20 + n) + code for n in range(count))


WHOLE: dict[str, bytes] = {
    "metadata of torch": metadata(N),
    "metadata of torch in protocol 2": metadata(N // 4, 2),
    "metadata of torch in five dimensions": metadata(N // 4, dims=5),
    "metadata of ours": ours(N),
    "tensors": pickle.dumps([OrderedDict(a=1), {1, 2}, frozenset([3]), 2**100, 1.5, b"x"] * N, 2),
    **{f"values in protocol {n}": pickle.dumps([{str(i): (i, [i], -1.5)} for i in range(N)], n) for n in range(6)},
    "arguments": pickle.dumps(argparse.Namespace(**{f"a{n}": n for n in range(N)})),
}
LOADED: dict[str, bytes] = {
    "empty dicts": b"(" + b"}" * N + b"t",
    "small dicts": b"](" + b"}\x94(K\x01K\x02u" * N + b"e",
    "dicts of one": b"(" + b"}\x94K\x01K\x02s" * N + b"t",
    "a dict by pairs": b"}" + integers(N, b"Ns"),
    "a dict": b"}(" + integers(N, b"N") + b"u",
    "a dict of marks": b"(" + integers(N, b"N") + b"d",
    "an ordered dict": function("collections.OrderedDict") + b")R(" + integers(N, b"N") + b"u",
    "ordered dicts": function("collections.OrderedDict") + b"\x940(" + b"h\x00)R(K\x01K\x02u" * N + b"t",
    "lists": b"(" + b"]" * N + b"t",
    "lists of one": b"(" + b"]Na" * N + b"t",
    "a list by items": b"]" + b"Na" * N,
    "sets": b"(" + b"\x8f" * N + b"t",
    "a set": b"\x8f(" + integers(N) + b"\x90",
    "a frozen set": b"(" + integers(N) + b"\x91",
    "frozen sets": b"(" + b"(K\x01\x91" * N + b"t",
    "tuples": b"(" + b"N\x85" * N + b"t",
    "tuples of three": b"(" + b"NNN\x87\x94" * N + b"t",
    "wide tuples": b"(" + (b"(" + b"N" * 9 + b"t") * N + b"t",
    "remembered": b"N" + b"\x94" * N,
    "remembered far": b"N" + b"".join(b"r" + struct.pack("<I", 5 * n) for n in range(N)),
    "marks": b"(" * N + b"1" * (N - 1) + b"t",
    "floats": b"(" + (b"G" + bytes(8)) * N + b"t",
    "long integers": b"(" + (b"\x8a\xff" + b"\x01" * 255) * (N // 10) + b"t",
    "text": b"(" + (b"X" + struct.pack("<L", 900) + b"a" * 900) * (N // 10) + b"t",
    "text of wide characters": b"(" + (b"X\x68\0\0\0" + b"a" * 100 + "\U0001f600".encode()) * (N // 10) + b"t",
    "bytes": b"(" + (b"C\xff" + b"a" * 255) * (N // 10) + b"t",
    "names": b"(" + named(1000) + b"t",
    "stand-ins": b"cmegatron\na\n\x940(" + b"h\x00NNN\x87R" * N + b"t",
    "records": function(DCP + "ChunkStorageMetadata") + b"\x940(" + b"h\x00)\x81" * N + b"t",
    "bare records": function("megatron.x.y") + b"\x940(" + b"h\x00)\x81}(h\x00h\x00ub" * N + b"t",
    "arguments one by one": function("argparse.Namespace") + b"\x94" + word("k") + b"\x940"
    b"0(" + b"h\x00)\x81}(h\x01Nub" * N + b"t",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", [*WHOLE, *LOADED])
def test_no_pickle_takes_more_than_its_price(name: str) -> None:
    data = WHOLE.get(name) or PROTO + LOADED[name] + STOP
    budget = Budget(2**40)
    assert end_of(data, budget) == len(data)
    reader = pickles.RestrictedUnpickler(io.BytesIO(data), budget)
    is_metadata = name.startswith("metadata") and "protocol" not in name
    if is_metadata:
        gc.collect()  # empties lists of spare tuples, whose use tracemalloc does not count
    tracemalloc.start()
    try:
        tree = reader.load()  # noqa: F841 -- kept until the peak is read
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    price = budget.limit - budget.left
    assert peak <= price
    if is_metadata:  # or checkpoints would be refused that could be read
        assert price < 1.7 * peak


@pytest.mark.parametrize("name", ["torch", "ours"])
def test_a_large_checkpoint_is_read(name: str) -> None:
    rows = N
    data = metadata(rows) if name == "torch" else ours(rows)
    budget = Budget()
    end_of(data, budget)
    assert (budget.limit - budget.left) / rows * 250_000 < budget.limit


COPIES: dict[str, bytes] = {
    "a list": b"](" + b"N" * 10**5 + b"e\x94" + function("torch.Size") + b"\x940(" + b"h\x01h\x00\x85R" * 9 + b"t",
    "arguments": b"(" + b"N" * 10**5 + b"t\x94" + function("megatron.x") + b"\x940(" + b"h\x01h\x00R" * 99 + b"t",
    "a set": b"](" + integers(9000) + b"e\x94" + function("builtins.set") + b"\x940(" + b"h\x01h\x00\x85R" * 99 + b"t",
    "pairs": b"](" + b"NN\x86" * 9000 + b"e\x94" + function("collections.OrderedDict")
    + b"\x940(" + b"h\x01h\x00\x85R" * 99 + b"t",
    "text": b"X" + struct.pack("<L", 10**6) + b"a" * 10**6 + b"\x94" + function("_codecs.encode")
    + b"\x940(" + b"h\x01h\x00\x85R" * 99 + b"t",
}  # fmt: skip


@pytest.mark.parametrize("name", COPIES)
def test_what_a_call_copies_is_counted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickle_prices, "MEMORY", 2**24)
    with pytest.raises(UnreadableCheckpoint, match=r"takes more than 16,777,216 bytes|can only concatenate tuple"):
        pickles.load(io.BytesIO(PROTO + COPIES[name] + STOP), "`x`")


def test_metadata_that_is_too_large_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".metadata").write_bytes(metadata(N))
    assert len(dcp.read(tmp_path).chunks["w"]) == N
    monkeypatch.setattr(pickle_prices, "MEMORY", 2**20)
    expected = r"\.metadata` is not read: it takes more than 1,048,576 bytes of memory, with \d+,\d{3} records in its"
    with pytest.raises(UnreadableCheckpoint, match=expected) as refused:
        dcp.read(tmp_path)
    assert f"(a larger `{pickle_prices.VARIABLE}` in the environment allows it)" in str(refused.value)
    monkeypatch.setenv(pickle_prices.VARIABLE, "64")
    assert len(dcp.read(tmp_path).chunks["w"]) == N


def test_opcodes_that_make_nothing_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickle_walk, "MAX_STEPS", 1000)
    with pytest.raises(TooMuch, match="more than 1,000 opcodes"):
        end_of(b"N0" * 1000 + b"N.", Budget())


def test_remembered_by_two_ways_is_refused() -> None:
    with pytest.raises(ValueError, match="numbers some of what it remembers"):
        end_of(PROTO + b"N\x94q\x01.", Budget())


def test_the_dict_that_an_object_was_made_of_is_emptied() -> None:
    state: dict[str, Any] = {"offsets": (1, 2), "sizes": (3, 4)}
    chunk = pickles.RestrictedUnpickler(io.BytesIO()).find_class(DCP[:-1], "ChunkStorageMetadata")()
    chunk.__setstate__(state)
    assert (chunk.offsets, chunk.sizes, state) == ((1, 2), (3, 4), {})
    assert not hasattr(chunk, "__dict__")


@pytest.mark.parametrize("field", ["fqn", "offset", "relative_path"])
def test_what_is_hashed_in_metadata_is_proven_before(field: str, tmp_path: Path) -> None:
    """Tuples of 2**60 parts, in the place of a name, of a shape and of a file."""
    values = {"fqn": word("w"), "offset": b"N", "relative_path": word("x"), field: b")" + b"2\x86" * 60}
    index = word("fqn") + values["fqn"] + word("offset") + values["offset"]
    place = word("relative_path") + values["relative_path"] + word("offset") + b"K\x00" + word("length") + b"K\x01"
    storage = function("torch.distributed.checkpoint.filesystem._StorageInfo") + b")\x81}(" + place + b"ub"
    pair = function(DCP + "MetadataIndex") + b")\x81}(" + index + b"ub" + storage
    fields = word("state_dict_metadata") + b"}" + word("storage_data") + b"}" + pair + b"s"
    (tmp_path / ".metadata").write_bytes(PROTO + function(DCP + "Metadata") + b")\x81}(" + fields + b"ub" + STOP)
    with pytest.raises(UnreadableCheckpoint, match=r"has no name and no offset|is in no file"):
        dcp.read(tmp_path)
