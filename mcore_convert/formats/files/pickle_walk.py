"""Bounds of the memory and the time for reading a pickle, computed before it is read.

Python's unpickler allocates any memory that a pickle asks for, and never finishes hashing tuples that contain each
other many times over. So the opcodes, each with a price, are scanned first. No object is built: the stack holds a
number for each object, the parts that hashing it visits.
"""

from __future__ import annotations

import operator
import re
import struct
from collections.abc import Callable

from mcore_convert.formats.files.pickle_prices import (
    CALL,
    CLASS,
    COLLECTS,
    FORGETTING,
    HEAVY,
    IN_RECORD,
    INTEGER,
    MAKES,
    MARK,
    PUSHED,
    PUSHES,
    RECORDS,
    REMEMBERED,
    REMEMBERING,
    SIZED,
    SOME_ITEMS,
    SOME_PAIRS,
    TEXT,
    WIDE,
    Budget,
    TooMuch,
)
from mcore_convert.formats.files.pickle_tensors import VISITED, tensor_at

MAX_PICKLE = 2**28  # bytes
MAX_KEY = 10_000  # parts of one key of a dict, which also bounds the recursion of its hash
MAX_KEYS = 500_000_000  # parts of all keys: hashing them takes seconds
MAX_INTEGER = 1024  # bytes of an integer: the time to hash it grows with its length
SMALL_INTEGER = 8  # bytes, beyond which thousands of integers can have one hash
FLAT = 12  # assumed parts of a memoized object that is not recorded as heavier: half of those of a tensor
MAX_ATOMS = 1000  # a tensor refers to few names and classes
ENDLESS = 2**62
MAX_STEPS = 12_000_000  # opcodes outside of records: they take seconds

_INTEGERS = b"\x8a\x8b"
_RUN = re.compile(rb"(.)\1{0,999}", re.DOTALL)  # of one byte; limited, since the budget is checked between runs


class Unfinished(ValueError):
    """Opcodes that continue beyond the given bytes."""


def end_of(data: bytes, budget: Budget) -> int:
    """Return the end of the pickle at the beginning of `data`, and take its price from the budget.

    Raises:
        Unfinished: it does not end in `data`.
        TooMuch: it takes more than is left.
        ValueError: it is not a pickle, asks for more than its size justifies, or for hashes that take too long.
    """
    walk = _Walk(data)
    try:
        walk.run(budget.left)
    except IndexError:
        raise ValueError("an opcode takes more than there is") from None
    finally:
        budget.left -= walk.spent
    if budget.left < 0:
        what = f"{walk.records:,} records" if walk.records else "what lies"
        budget.take(0, f"{what} in its first {walk.at:,} bytes")
    if walk.at > len(data) or not walk.is_done:
        raise Unfinished(
            "pickle data was truncated" if walk.at > len(data) else "Ran out of input"
        )  # pickle's own messages
    return walk.at


class _Walk:
    """A scan of the opcodes of a pickle: its position and its counters."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = self.spent = self.records = self.hashed = 0
        self.remembered = self.numbers = 0  # memoized objects, and size of the memo
        self.stack: list[int] = []  # number of parts that hashing each object visits
        self.below: list[list[int]] = []  # the stacks below the marks
        self.heavy: dict[int, int] = {}  # parts of memoized objects with more than FLAT
        self.atoms: set[int] = set()  # memo numbers of objects of one part, though not of all
        self.numbered: set[bool] = set()  # whether the pickle numbers its memo explicitly
        self.record = REMEMBERING
        self.is_done = False

    def run(self, limit: int) -> None:
        """Scan to the end of the pickle, or of the data, or until more than the limit is spent."""
        data, size = self.data, len(self.data)
        for _ in range(MAX_STEPS):
            if self.at >= size or self.spent > limit or self.is_done:
                return
            step = _STEPS.get(data[self.at])
            if step is None:
                raise ValueError(f"invalid load key, {chr(data[self.at])!r}.")
            step(self, data[self.at])
        raise TooMuch(f"it has more than {MAX_STEPS:,} opcodes beside those of records")

    def _argument(self, width: int) -> int:
        return int.from_bytes(self.data[self.at + 1 : self.at + width], "little")

    def _push(self, parts: int, price: int) -> None:
        self.stack.append(min(parts, ENDLESS))
        self.spent += price + PUSHED

    def _get(self, code: int) -> None:
        width = 2 if code == ord("h") else 5
        if self.data.startswith(b")\x81", self.at + width) and self._records():
            return
        if self.data.startswith(b"((", self.at + width) and self._is_tensor():
            return
        self._push(self.heavy.get(self._argument(width), FLAT), 0)
        self.at += width

    def _records(self) -> int:
        """Skip the records that begin here, and return their number."""
        data, at = self.data, self.at
        match = self.record.match
        counts = [0, 0, 0]  # by number of shapes
        row = match(data, at)
        if row is None:
            self.record = FORGETTING if self.record is REMEMBERING else REMEMBERING
            match = self.record.match
            row = match(data, at)
        while row is not None:
            counts[row.lastindex or 0] += 1
            at = row.end()
            row = match(data, at)
        self.at, count = at, sum(counts)
        if count and self.record is REMEMBERING:
            self.remembered += sum(map(operator.mul, counts, IN_RECORD))
            self.numbers = max(self.numbers, self.remembered)
            self.numbered.add(False)
        self.spent += sum(map(operator.mul, counts, RECORDS[self.record]))
        self.stack += [1] * count
        self.records += count
        return count

    def _is_tensor(self) -> bool:
        """Skip the tensor that begins here, if it consists of atoms. It is no atom itself, so tensors do not nest."""
        tensor = tensor_at(self.data, self.at)
        if tensor is None or not self.atoms.issuperset(tensor.gets):
            return False
        if tensor.puts:
            numbers = max(tensor.puts) + 1
            if min(tensor.puts) < self.numbers or numbers > self.at:
                return False
            self.spent += REMEMBERED * (numbers - self.numbers)
            self.numbers = numbers
            self.remembered += len(tensor.puts)
            self.numbered.add(True)
        self.spent += tensor.price
        self.stack.append(VISITED)
        self.at = tensor.end
        return True

    def _simple(self, code: int) -> None:
        width, price = PUSHES[code]
        run = _RUN.match(self.data, self.at) if width == 1 else None  # a hostile pickle may have millions in a row
        count = len(run[0]) if run else 1
        self.stack += [1] * count
        self.spent += count * (price + PUSHED)
        self.at += count * width

    def _memoize(self, _: int) -> None:
        self._remember(self.remembered, is_numbered=False)
        self.at += 1

    def _put(self, code: int) -> None:
        width = 2 if code == ord("q") else 5
        self._remember(self._argument(width), is_numbered=True)
        self.at += width

    def _remember(self, number: int, *, is_numbered: bool) -> None:
        if number > self.at:
            raise ValueError(f"it remembers something as number {number:,}")
        self.numbered.add(is_numbered)
        self.remembered += 1
        if number >= self.numbers:
            self.spent += REMEMBERED * (number + 1 - self.numbers)
            self.numbers = number + 1
        parts = self.stack[-1]
        if parts > 1:
            self.atoms.discard(number)
        elif len(self.atoms) < MAX_ATOMS:
            self.atoms.add(number)
        if parts > FLAT:
            self.heavy[number] = parts
            self.spent += HEAVY
        else:
            self.heavy.pop(number, None)

    def _make(self, code: int) -> None:
        count, price = MAKES[code]
        parts = [self.stack.pop() for _ in range(count)]
        self._push(1 if code in b"\x81\x92Q\x93" else 1 + sum(parts), price)
        self.at += 1

    def _mark(self, _: int) -> None:
        self.below.append(self.stack)
        self.stack = []
        self.spent += MARK
        self.at += 1

    def _collect(self, code: int) -> None:
        price, each = COLLECTS[code]
        items = self._collected()
        self.spent += price + each * len(items)
        if code in b"ud":
            self._hash(items[::2])
        elif code in b"\x90\x91":
            self._hash(items)
        if code in b"ue\x90":
            self.stack[-1]  # the object that they are added to
        elif code != ord("1"):
            self._push(1 + sum(items) if code == ord("t") else 1, 0)
        self.at += 1

    def _collected(self) -> list[int]:
        items, self.stack = self.stack, self.below.pop()
        return items

    def _hash(self, keys: list[int]) -> None:
        self.hashed += sum(keys)
        if max(keys, default=0) > MAX_KEY or self.hashed > MAX_KEYS:
            raise ValueError(f"it has a key of more than {MAX_KEY:,} parts, or {MAX_KEYS:,} in all")

    def _add(self, code: int) -> None:
        """Add one item to a list, one pair to a dict, or a state to an object."""
        self.stack.pop()
        if code == ord("s"):
            self._hash([self.stack.pop()])
        self.stack[-1]
        self.spent += {ord("a"): SOME_ITEMS, ord("s"): SOME_PAIRS}.get(code, 0)
        self.at += 1

    def _pop(self, _: int) -> None:
        if self.stack:
            self.stack.pop()
        else:
            self._collected()
        self.at += 1

    def _duplicate(self, _: int) -> None:
        self._push(self.stack[-1], 0)
        self.at += 1

    def _sized(self, code: int) -> None:
        form, each = SIZED[code]
        start = self.at + 1 + struct.calcsize(form)
        length = self._argument(start - self.at)
        if length > MAX_PICKLE:
            raise ValueError(f"it claims a part of {length:,} bytes")
        if code in _INTEGERS and length > MAX_INTEGER:
            raise ValueError(f"it has an integer of {length:,} bytes")
        if each == 5 and self.data[start : start + length].isascii():
            each = 1
        self._push(MAX_KEY if code in _INTEGERS and length > SMALL_INTEGER else 1, TEXT + each * length)
        self.at = start + length

    def _line(self, code: int) -> None:
        start = self.at + 1
        end = start
        for _ in range(2 if code in b"ci" else 1):
            end = self.data.find(b"\n", end) + 1
            if not end:
                self.at = len(self.data) + 1
                return
        line = self.data[start : end - 1]
        if code == ord("p"):
            self._remember(int(line[:20]), is_numbered=True)
        elif code == ord("g"):
            self._push(self.heavy.get(int(line[:20]), FLAT), 0)
        elif code in b"ci":
            self._push(1, CLASS + (CALL + 8 * len(self._collected()) if code == ord("i") else 0))
        else:
            self._push(MAX_KEY if code in b"IL" and len(line) > 2 * SMALL_INTEGER else 1, TEXT + 5 * len(line))
        self.at = end

    def _skip(self, code: int) -> None:
        self.at += 2 if code == 0x80 else 9

    def _stop(self, _: int) -> None:
        self.is_done = True
        self.at += 1
        if len(self.numbered) > 1:
            raise ValueError("it numbers some of what it remembers, and not all")
        if self.records:  # their integers and wide tuples were not counted
            self.spent += INTEGER * sum(self.data.count(each, 0, self.at) for each in (b"M", b"J", b"\x8a"))
            self.spent += WIDE * sum(self.data.count(each, 0, self.at) for each in (b"t\x85", b"t\x94\x85"))


_STEPS: dict[int, Callable[[_Walk, int], None]] = {
    **dict.fromkeys(b"hj", _Walk._get),
    **dict.fromkeys(PUSHES, _Walk._simple),
    **dict.fromkeys(MAKES, _Walk._make),
    **dict.fromkeys(COLLECTS, _Walk._collect),
    **dict.fromkeys(SIZED, _Walk._sized),
    **dict.fromkeys(b"FILSVgpPci", _Walk._line),
    **dict.fromkeys(b"asb", _Walk._add),
    **dict.fromkeys(b"qr", _Walk._put),
    **dict.fromkeys(b"\x80\x95", _Walk._skip),
    0x94: _Walk._memoize,
    ord("("): _Walk._mark,
    ord("0"): _Walk._pop,
    ord("2"): _Walk._duplicate,
    ord("."): _Walk._stop,
}
