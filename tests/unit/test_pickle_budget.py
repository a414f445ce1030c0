"""Pickles that take memory, time or the stack: each is refused in a process of 1 GiB within seconds, none ends it."""

from __future__ import annotations

import argparse
import io
import pickle
import struct
import subprocess
import sys
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_convert.errors import UnreadableCheckpoint, UnsafePickle
from mcore_convert.formats.files import pickles
from mcore_convert.formats.files.dcp import METADATA
from mcore_convert.formats.files.pickle_budget import MAX_DEPTH, check_tree
from mcore_convert.formats.files.pickle_prices import Budget
from mcore_convert.formats.files.pickle_walk import end_of
from tests.conftest import SHARED

PROTO, STOP = b"\x80\x04", b"."


def word(text: str) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text.encode()


def function(name: str) -> bytes:
    module, _, last = name.rpartition(".")
    return word(module) + word(last) + b"\x93"


def shared(levels: int) -> bytes:
    """Return a list of two lists that are one, and so on: 2**levels parts in a few bytes."""
    return b"]" + b"".join(
        b"\x94" + b"]h" + bytes([number]) + b"ah" + bytes([number]) + b"a" for number in range(levels)
    )


def alike(number: int) -> bytes:
    """Return a pair whose key has the hash that all of these have."""
    return b"\x8a\x0c" + (number * (2**61 - 1)).to_bytes(12, "little") + b"N"


HOSTILE: dict[str, bytes] = {
    "BUILD on a function": function("torch._utils._rebuild_tensor_v2") + b"(NNNNtb",
    "BUILD on a function, by slots": function("torch.Size") + b"N}" + word("_call") + b"Ns\x86b",
    "BUILD on a class": function("torch.distributed.checkpoint.metadata.Metadata") + b"N}" + word("x") + b"Ns\x86b",
    "BUILD on the class of arguments": function("argparse.Namespace") + b"N}" + word("__eq__") + b"Ns\x86b",
    "BUILD on a stand-in": function("megatron.core.enums.ModelType") + b"N}" + word("append") + b"Ns\x86b",
    "a list that holds itself": b"]\x94h\x00a",
    "a dict that holds itself": b"}\x94" + word("k") + b"h\x00s",
    "shared lists": shared(60),
    "deep lists": b"]" * 200_000 + b"a" * 199_999,
    "deep tuples": b")" + b"\x85" * 200_000,
    "deep tuples as a key": b"})" + b"\x85" * 200_000 + b"Ns",
    "deep tuples in a set": b"\x8f()" + b"\x85" * 200_000 + b"\x90",
    "deep tuples in marks": b"(" * 200_000 + b"t" * 200_000,
    "an entry of the memo": b"Nr\xff\xff\xff\x0c",
    "an entry of the memo, in digits": b"Np200000000\n",
    "a string of 2 GiB": b"X\xff\xff\xff\x7f",
    "bytes of 2**60": b"\x8e" + struct.pack("<Q", 2**60),
    "a byte array of 2**33": b"\x96" + struct.pack("<Q", 2**33),
    "6 MB of lists": b"]" * 6_000_000,
    "3 MB of sets": b"\x8f" * 3_000_000,
    "an endless number": b"I" + b"9" * 5000 + b"\n",
    "a long number": b"\x8b" + struct.pack("<L", 2**31 - 1),
    "an extension": b"\x82\x01",
    "a frame of 2**60": b"\x95" + struct.pack("<Q", 2**60) + b"N",
    "a key that is an object": b"}" + function("megatron.core.enums.ModelType") + b")\x81Ns",
    "a key of tuples that hold one twice": b"})" + b"2\x86" * 60 + b"Ns",
    "a key of tuples that are remembered": b"})\x94" + b"".join(b"h%c\x86\x94" % n for n in range(60)) + b"Ns",
    "a key of shared tuples, in a set": b"\x8f()" + b"2\x86" * 60 + b"\x90",
    "a set of shared tuples, by a call": function("builtins.set") + b"](" + b")" + b"2\x86" * 60 + b"e\x85R",
    "integers of one hash": b"}(" + b"".join(map(alike, range(60_000))) + b"u",
    "the hash of a long integer": b"}\x8b" + struct.pack("<L", 10**6) + b"\x01" * 10**6 + b"\x94" + b"h\x00Ns" * 10**4,
    "nothing at all": b"",
}

CODE = """
import io, resource, sys
from mcore_convert.errors import UnreadableCheckpoint
from mcore_convert.formats.files import pickles
from mcore_convert.formats.files.pickle_budget import check_tree
from mcore_convert.formats.files import dcp
from pathlib import Path
resource.setrlimit(resource.RLIMIT_DATA, (2**30, 2**30))
data = sys.stdin.buffer.read()
try:
    check_tree(pickles.load(io.BytesIO(data), "it"))
    print("loaded")
except (UnreadableCheckpoint, ValueError) as error:
    print(type(error).__name__)
place = Path(sys.argv[1])
(place / ".metadata").write_bytes(data)
try:
    dcp.read(place)
    print("loaded")
except UnreadableCheckpoint as error:
    print(type(error).__name__)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_pickles_are_refused(name: str, tmp_path: Path) -> None:
    start = time.monotonic()
    command = [sys.executable, "-c", CODE, str(tmp_path)]
    ended = subprocess.run(command, input=PROTO + HOSTILE[name] + STOP, capture_output=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr.decode()[-500:]
    assert set(ended.stdout.decode().split()) <= {"UnreadableCheckpoint", "UnsafePickle", "ValueError"}
    assert time.monotonic() - start < 60


@pytest.mark.parametrize("name", [name for name in HOSTILE if name.startswith("BUILD")])
def test_nothing_that_can_be_called_is_changed(name: str) -> None:
    with pytest.raises((UnsafePickle, UnreadableCheckpoint)):
        pickles.load(io.BytesIO(PROTO + HOSTILE[name] + STOP), "it")


ORDINARY: list[Any] = [
    None,
    {"args": argparse.Namespace(a=1, b=[1.5, "x"], c=None), "iteration": 7},
    OrderedDict(a=(1, 2), b={"c": {3: b"bytes"}}),
    [{(1, 2): "x"}, {True, "y"}, frozenset([3])],
    "x" * 70_000,
    b"y" * 70_000,
    bytearray(b"z" * 300),
    list(range(-70_000, 70_000)),
    2**200,
    "\udc80 and \n lines",
    complex(1, 2),
    [float("inf"), -0.0],
    torch.Size([3, 4]),
    [f"a{number}" for number in range(1000)] * 2,
]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_ordinary_pickles_end_where_they_end(protocol: int) -> None:
    for value in ORDINARY:
        data = pickle.dumps(value, protocol)
        assert end_of(data + b"what follows", Budget()) == len(data), (protocol, value)
        check_tree(pickle.loads(data))


def test_pickles_in_a_row_are_read_one_by_one() -> None:
    file = io.BytesIO(b"".join(pickle.dumps([value] * 1000) for value in ("a" * 3000, "b", 3)) + b"the storages")
    assert [pickles.load(file, "it")[0] for _ in range(3)] == ["a" * 3000, "b", 3]
    assert file.read() == b"the storages"


def test_the_depth_that_is_allowed() -> None:
    tree: Any = "leaf"
    for _ in range(MAX_DEPTH):
        tree = [tree]
    check_tree(tree)
    with pytest.raises(ValueError, match="nested more than"):
        check_tree([tree])


def test_real_checkpoints_stay_far_below() -> None:
    files = [path for path in SHARED.rglob("*") if path.name == METADATA]
    if not files:
        pytest.skip("the real Megatron-LM checkpoints are not at hand")
    for path in files:
        data = path.read_bytes()
        assert end_of(data, budget := Budget()) == len(data)
        assert budget.limit - budget.left < 50 * len(data) + 2**18
