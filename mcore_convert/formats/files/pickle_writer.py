"""Writing pickles of classes that need not be importable: classes are named, not loaded.

Python's C pickler imports every class that it names. The pure-Python pickler, which can be changed not to, took longer
for a model of many experts than the rest of a plan.
"""

from __future__ import annotations

import argparse
import io
import pickle
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

from mcore_convert.formats.files.pickle_records import INTEGERS
from mcore_convert.formats.files.pickles import DTYPE_STORAGES, TensorRef
from mcore_convert.spec.config.arguments import TorchDtype

BATCH = 1000  # entries of a list or dict that a reader holds before it adds them, as in Python's own pickles


class Global(NamedTuple):
    """A class or function by name."""

    module: str
    name: str


@dataclass(frozen=True, eq=False)
class Call:
    """Result of a call of `function`."""

    function: Global
    args: tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Instance:
    """An object of `kind` with a state, compared by identity so that it can be the key of a dict."""

    kind: Global
    state: Any


class Hole:
    """Placeholder for a value that differs between otherwise equal objects."""


HOLE = Hole()


@dataclass(frozen=True, eq=False)
class Rows:
    """A list or dict of many objects: each group has one object with holes, and the values for them, row by row.

    In a list the object of a group is an item, in a dict a pair. Values are integers, strings, and tuples of integers.
    Metadata of many experts consists of such rows: their common bytes are computed once and copied.
    """

    groups: tuple[tuple[Any, Iterable[tuple[int | str | tuple[int, ...], ...]]], ...]
    is_dict: bool = False


REBUILD = Global("torch._utils", "_rebuild_tensor_v2")
NO_HOOKS = Call(Global("collections", "OrderedDict"), ())
NAMESPACE = Global("argparse", "Namespace")
STORAGES = {dtype: Global("torch", storage) for dtype, storage in DTYPE_STORAGES.items()}


class _Writer:
    """Pickler of protocol 2 that writes the records of this module as the classes that they name.

    Repeated strings and names are memoized, other objects are not: a memo of all objects would take more memory than
    the rest of writing. Equal trees have equal bytes.
    """

    def __init__(self) -> None:
        self.content = bytearray(pickle.PROTO + b"\x02")
        self._memo: dict[str | Global, bytes] = {}
        self._kinds: dict[str, bytes] = {}  # first opcodes of the tensors of a dtype
        self._values: Iterator[Any] = iter(())  # values for the holes of the object that is written
        self._parts: list[bytes] | None = None  # bytes between the holes, while a frame is built

    def write(self, item: Any) -> None:
        """Append an object."""
        kind = type(item)
        if kind is int:
            self.content += _integer(item)
        else:
            _WRITERS.get(kind, _Writer._other)(self, item)

    def _numbered(self, item: str | Global) -> bytes:
        """Return the opcode that memoizes the last object, so that it can be referred to."""
        number = len(self._memo)
        self._memo[item] = _numbered(pickle.BINGET, pickle.LONG_BINGET, number)
        return _numbered(pickle.BINPUT, pickle.LONG_BINPUT, number)

    def _string(self, item: str) -> None:
        self.content += self._memo.get(item) or self._text(item)

    def _text(self, item: str) -> bytes:
        """Return the opcodes of a string that occurs for the first time."""
        encoded = item.encode("utf-8", "surrogatepass")
        return pickle.BINUNICODE + struct.pack("<I", len(encoded)) + encoded + self._numbered(item)

    def _global(self, item: Global) -> None:
        known = self._memo.get(item)
        if known is not None:
            self.content += known
            return
        self.content += pickle.GLOBAL + f"{item.module}\n{item.name}\n".encode() + self._numbered(item)

    def _constant(self, item: bool | None) -> None:
        self.content += pickle.NONE if item is None else pickle.NEWTRUE if item else pickle.NEWFALSE

    def _float(self, item: float) -> None:
        self.content += pickle.BINFLOAT + struct.pack(">d", item)

    def _tuple(self, item: tuple[Any, ...]) -> None:
        if {*map(type, item)} <= INTEGERS:
            self.content += _integers(item)
            return
        if len(item) > 3:
            self.content += pickle.MARK
        for part in item:
            self.write(part)
        self.content += _TUPLES.get(len(item), pickle.TUPLE)

    def _list(self, item: list[Any]) -> None:
        self.content += pickle.EMPTY_LIST
        self._batches(item, pickle.APPEND, pickle.APPENDS)

    def _dict(self, item: Mapping[Any, Any]) -> None:
        self.content += pickle.EMPTY_DICT
        self._batches(item.items(), pickle.SETITEM, pickle.SETITEMS)

    def _batches(self, items: Collection[Any], one: bytes, several: bytes) -> None:
        """Append the items of a list, or the pairs of a dict, in batches."""
        left, is_one = iter(items), len(items) == 1
        for _ in range(0, len(items), BATCH):
            self.content += b"" if is_one else pickle.MARK
            for part in islice(left, BATCH):
                if one is pickle.SETITEM:
                    self.write(part[0])
                    self.write(part[1])
                else:
                    self.write(part)
            self.content += one if is_one else several

    def _call(self, item: Call) -> None:
        self._global(item.function)
        if len(item.args) == 1 and type(item.args[0]) is tuple:  # a shape: most calls in metadata
            self._tuple(item.args[0])
            self.content += pickle.TUPLE1 + pickle.REDUCE
        else:
            self._tuple(item.args)
            self.content += pickle.REDUCE

    def _instance(self, item: Instance) -> None:
        self._global(item.kind)
        self.content += pickle.EMPTY_TUPLE + pickle.NEWOBJ
        if item.state is not None:
            self.write(item.state)
            self.content += pickle.BUILD

    def _rows(self, item: Rows) -> None:
        self.content += pickle.EMPTY_DICT if item.is_dict else pickle.EMPTY_LIST
        for shape, rows in item.groups:
            parts = shape if item.is_dict else (shape,)
            left = iter(rows)
            frame: list[bytes] | None = None
            while batch := list(islice(left, BATCH)):
                self.content += pickle.MARK
                if frame is None:
                    self._filled(parts, batch.pop(0))  # all names are memoized now
                    frame = self._frame(parts)
                self._copies(frame, batch)
                self.content += pickle.SETITEMS if item.is_dict else pickle.APPENDS

    def _copies(self, frame: list[bytes], rows: Iterable[tuple[Any, ...]]) -> None:
        """Append an object for each row: the bytes around the holes, and the values."""
        known, form = self._memo.get, b"%b".join(part.replace(b"%", b"%%") for part in frame)
        for row in rows:
            values = [
                _integers(value)
                if type(value) is tuple
                else _integer(value)
                if type(value) is int
                else known(value) or self._text(value)
                for value in row
            ]
            self.content += form % tuple(values)

    def _filled(self, parts: tuple[Any, ...], row: tuple[Any, ...]) -> None:
        """Append an object with the values of a row in its holes."""
        self._values = iter(row)
        for part in parts:
            self.write(part)

    def _frame(self, parts: tuple[Any, ...]) -> list[bytes]:
        """Return the bytes of an object before, between and after its holes."""
        whole, self.content, self._parts = self.content, bytearray(), []
        for part in parts:
            self.write(part)
        frame = [*self._parts, bytes(self.content)]
        self.content, self._parts = whole, None
        return frame

    def _hole(self, _: Hole) -> None:
        if self._parts is None:
            self.write(next(self._values))
        else:
            self._parts.append(bytes(self.content))
            self.content.clear()

    def _dtype(self, item: TorchDtype) -> None:
        self._global(Global("torch", item.name))

    def _namespace(self, item: argparse.Namespace) -> None:
        self._instance(Instance(NAMESPACE, vars(item)))

    def _tensor(self, item: TensorRef) -> None:
        """Write a tensor as `torch.save` does: its storage as a persistent id, and a call that rebuilds the tensor."""
        storage, memo = item.storage, self._memo
        known = self._kinds.get(storage.dtype)
        if known is None:
            self._global(REBUILD)
            self.content += pickle.MARK + pickle.MARK
            self._string("storage")
            self._global(STORAGES[storage.dtype])
        else:
            self.content += known
        self._string(storage.key)
        self._string("cpu")
        self.content += _integer(storage.numel) + pickle.TUPLE + pickle.BINPERSID
        self.content += _integer(item.offset) + _integers(item.shape) + _integers(item.strides) + pickle.NEWFALSE
        self._call(NO_HOOKS)
        self.content += pickle.TUPLE + pickle.REDUCE
        if known is None:  # all names are memoized now
            begin = memo[REBUILD] + pickle.MARK + pickle.MARK + memo["storage"]
            self._kinds[storage.dtype] = begin + memo[STORAGES[storage.dtype]]

    def _other(self, item: Any) -> None:
        """Write a value of a class of Python's own, such as a set or bytes, as Python writes it."""
        buffer = io.BytesIO()
        writer = _PythonWriter(buffer, protocol=2)
        writer.fast = True  # without a memo, whose numbers would clash with this pickle's
        writer.dump(item)
        self.content += buffer.getvalue()[2:-1]  # without the protocol and the end


class _PythonWriter(pickle.Pickler):
    """Python's own pickler, which refuses classes of this package: a reader does not have them."""

    def reducer_override(self, obj: Any) -> Any:
        kind = obj if isinstance(obj, type) else type(obj)
        if kind.__module__.partition(".")[0] == __name__.partition(".")[0]:
            raise TypeError(f"{obj!r} cannot be written into a pickle")
        return NotImplemented


_TUPLES = {0: pickle.EMPTY_TUPLE, 1: pickle.TUPLE1, 2: pickle.TUPLE2, 3: pickle.TUPLE3}
_WRITERS: dict[type, Callable[[_Writer, Any], None]] = {
    str: _Writer._string,
    Global: _Writer._global,
    bool: _Writer._constant,
    type(None): _Writer._constant,
    float: _Writer._float,
    tuple: _Writer._tuple,
    list: _Writer._list,
    dict: _Writer._dict,
    Call: _Writer._call,
    Instance: _Writer._instance,
    Rows: _Writer._rows,
    Hole: _Writer._hole,
    TorchDtype: _Writer._dtype,
    argparse.Namespace: _Writer._namespace,
    TensorRef: _Writer._tensor,
}


def _numbered(short: bytes, long: bytes, number: int) -> bytes:
    return short + struct.pack("<B", number) if number < 256 else long + struct.pack("<I", number)


def _integer(item: int) -> bytes:
    if 0 <= item < 0x100:
        return pickle.BININT1 + struct.pack("<B", item)
    if 0 <= item < 0x10000:
        return pickle.BININT2 + struct.pack("<H", item)
    if -0x80000000 <= item < 0x80000000:
        return pickle.BININT + struct.pack("<i", item)
    encoded = pickle.encode_long(item)
    if len(encoded) < 256:
        return pickle.LONG1 + struct.pack("<B", len(encoded)) + encoded
    return pickle.LONG4 + struct.pack("<i", len(encoded)) + encoded


_dimension = lru_cache(maxsize=4096)(_integer)  # layer and expert numbers, and sizes


@lru_cache(maxsize=4096)
def _integers(items: tuple[int, ...]) -> bytes:
    """Return the opcodes of a tuple of integers, such as a shape; cached, since many are equal."""
    parts = b"".join(map(_dimension, items))
    return parts + _TUPLES[len(items)] if len(items) <= 3 else pickle.MARK + parts + pickle.TUPLE


def dumps(tree: Any) -> bytes:
    """Return the pickle of a tree of plain values, Namespaces and the records of this module."""
    writer = _Writer()
    writer.write(tree)
    return bytes(writer.content + pickle.STOP)
