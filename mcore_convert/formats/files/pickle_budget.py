"""Limits of a pickle: on what it may ask for before it is read, and on what it has built afterwards.

Python's own reader takes the memory that a pickle names (a string's length, an entry of its memo), and recurses as
deep as what it has built. So the opcodes are walked over first, without building anything, and what was built is
walked over before anybody recurses into it.
"""

from __future__ import annotations

import argparse
import pickle
import re
import struct
import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from mcore_convert.formats.files.pickle_records import Record
from mcore_convert.spec.config.arguments import TorchDtype

T = TypeVar("T")

MAX_PICKLE = 2**28  # bytes; the metadata of 10,000 ranks has half of that
MAX_DEPTH = 200  # of what a checkpoint holds beside its metadata
MAX_PARTS = 20_000_000  # of the same, with every part counted wherever it occurs
FREE_CONTAINERS = 1_000_000  # a pickle may have so many, and one for every DENSITY bytes; real ones take 20
DENSITY = 8
SHALLOW = 20_000  # tuples within one another that any stack can take
STACK_OF_TUPLE = 256  # bytes that hashing one takes, with those in it
MAX_STACK = 2**32

# Opcodes that have no argument, or one of a few bytes, and take no more memory than a few words. An entry of the memo
# has two bytes more where its number is below 2**23: larger ones are looked at. Integers of up to eight bytes are the
# offsets of chunks, of which a checkpoint has a hundred thousand: one match for all of them is three times as fast.
_NO_ARGUMENT = (
    pickle.MARK + pickle.POP + pickle.POP_MARK + pickle.DUP + pickle.NONE + pickle.REDUCE + pickle.BINPERSID
    + pickle.APPEND + pickle.BUILD + pickle.DICT + pickle.EMPTY_DICT + pickle.APPENDS + pickle.LIST + pickle.EMPTY_LIST
    + pickle.OBJ + pickle.SETITEM + pickle.TUPLE + pickle.EMPTY_TUPLE + pickle.SETITEMS + pickle.NEWOBJ + pickle.TUPLE1
    + pickle.TUPLE2 + pickle.TUPLE3 + pickle.NEWTRUE + pickle.NEWFALSE + pickle.EMPTY_SET + pickle.ADDITEMS
    + pickle.FROZENSET + pickle.NEWOBJ_EX + pickle.STACK_GLOBAL + pickle.MEMOIZE
)  # fmt: skip
_LONG = b"|".join(b"%c.{%d}" % (size, size) for size in range(9))
_FIXED = re.compile(
    b"(?:["
    + re.escape(_NO_ARGUMENT)
    + b"]++|[Kqh].|M..|[Jj].{4}|r..[\x00-\x7f]\x00|\x8a(?:"
    + _LONG
    + b")|G.{8}|\x80.)++",
    re.DOTALL,
)
_LENGTHS = {
    **dict.fromkeys(b"\x8cUC\x8a", "<B"),
    **dict.fromkeys(b"XTB\x8b", "<L"),
    **dict.fromkeys(b"\x8d\x8e\x96", "<Q"),
}
_LINES = {**dict.fromkeys(b"FILSVgpP", 1), **dict.fromkeys(b"ci", 2)}
_SIZED = b"KqhMJjGr\x80"  # have an argument of fixed size
_FRAME, _LONG_PUT, _PUT, _STOP = 0x95, ord("r"), ord("p"), ord(".")
_CONTAINERS = (b"]", b"}", b"\x8f", b"l", b"d", b"(", b"\x91")
_TUPLES = (b"\x85", b"\x86", b"\x87", b"t", b"\x91")


class Unfinished(ValueError):
    """Opcodes that go on beyond what was given."""


def end_of(data: bytes) -> int:
    """Return where the pickle at the beginning of `data` ends.

    Raises:
        Unfinished: not in `data`.
        ValueError: it asks for more than its own size justifies.
    """
    at, size = 0, len(data)
    fixed, lengths = _FIXED.match, _LENGTHS
    while True:
        match = fixed(data, at)
        if match is not None:
            at = match.end()
        if at == size:
            raise Unfinished("Ran out of input")  # these are the words of Python's own reader
        code = data[at]
        if code in lengths:
            kind = lengths[code]
            head = struct.calcsize(kind)
            if at + 1 + head > size:
                raise Unfinished("pickle data was truncated")
            (length,) = struct.unpack_from(kind, data, at + 1)
            if length > MAX_PICKLE:
                raise ValueError(f"it claims a part of {length:,} bytes")
            at += 1 + head + length
        elif code == _STOP:
            break
        elif code in _LINES:
            start = at + 1
            for _ in range(_LINES[code]):
                at = data.find(b"\n", at) + 1
                if not at:
                    raise Unfinished("pickle data was truncated")
            if code == _PUT:
                _check_entry(int(data[start : at - 1][:20]), at)
        elif code == _LONG_PUT and at + 5 <= size:
            _check_entry(struct.unpack_from("<L", data, at + 1)[0], at)
            at += 5
        elif code == _FRAME:
            at += 9
        elif code in _SIZED and at + 9 > size:
            raise Unfinished("pickle data was truncated")
        else:
            raise ValueError(f"invalid load key, {chr(code)!r}.")
        if at > size:
            raise Unfinished("pickle data was truncated")
    _check_density(data[: at + 1])
    return at + 1


def _check_entry(number: int, at: int) -> None:
    """Check an entry of the memo, which a pickle numbers from 0."""
    if number > at:
        raise ValueError(f"it remembers something as number {number:,}")


def _check_density(data: bytes) -> None:
    """Check a bound from above: these bytes occur in strings, too."""
    count = sum(map(data.count, _CONTAINERS))
    if count > FREE_CONTAINERS + len(data) // DENSITY:
        raise ValueError(f"it has up to {count:,} lists and dicts in {len(data):,} bytes")


def with_stack_for(data: bytes, function: Callable[[], T]) -> T:
    """Call a function that hashes whatever tuples a pickle may have nested, with a stack that is deep enough.

    Raises:
        ValueError: there are more of them than a stack can be made for.
    """
    tuples = sum(map(data.count, _TUPLES))
    if tuples <= SHALLOW:
        return function()
    if tuples * STACK_OF_TUPLE > MAX_STACK:
        raise ValueError(f"it has up to {tuples:,} tuples")
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    before = threading.stack_size(-(-tuples * STACK_OF_TUPLE // 2**20) * 2**20 + 2**20)
    try:
        thread = threading.Thread(target=run)
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def check_tree(tree: Any) -> None:
    """Prove that one can recurse into what was read: it is not too deep, holds not itself, and is as large as it looks.

    Raises:
        ValueError: it is not so, or it has a key that is no plain value.
    """
    sizes: dict[int, int] = {}  # of what is done, with every part counted wherever it occurs
    path: set[int] = set()
    pending: list[tuple[Any, bool]] = [(tree, False)]
    while pending:
        part, is_done = pending.pop()
        children = _children(part)
        if children is None:
            continue
        number = id(part)
        if is_done:
            path.discard(number)
            sizes[number] = 1 + sum(sizes.get(id(child), 1) for child in children)
            if sizes[number] > MAX_PARTS:
                raise ValueError("it holds the same parts again and again")
        elif number in path:
            raise ValueError("a part of it holds itself")
        elif number not in sizes:
            path.add(number)
            if len(path) > MAX_DEPTH:
                raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
            pending.append((part, True))
            pending += [(child, False) for child in children]


def _children(part: Any) -> list[Any] | None:
    if isinstance(part, dict):
        _check_keys(part)
        return list(part.values())
    if isinstance(part, list | tuple):
        return list(part)
    if isinstance(part, set | frozenset):
        _check_keys(part)
        return []
    if isinstance(part, argparse.Namespace | Record):
        return list(vars(part).values())
    return None


def _check_keys(keys: Iterable[Any]) -> None:
    for key in keys:
        for each in key if type(key) is tuple else (key,):
            if type(each) is tuple or not isinstance(each, str | bytes | int | float | TorchDtype | None):
                raise ValueError(f"it has a key that is a {type(each).__name__}")
