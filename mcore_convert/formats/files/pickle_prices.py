"""Prices of a pickle's opcodes: upper bounds of the memory for the objects that they create.

Measured with 64-bit CPython 3.11, including the spare capacity of lists and dicts.
"""

from __future__ import annotations

import os
import re

MEMORY = 448 * 2**20  # bytes that one pickle may take: a process that reads it stays below 512 MiB
VARIABLE = "MCORE_CONVERT_PICKLE_MIB"  # environment variable: another limit, for a trusted checkpoint that needs it

# Prices in bytes.
RECORD, CALL, CLASS, REMEMBERED, PUSHED = 80, 272, 3000, 16, 10
DICT, LIST, TUPLE, SINGLE, SET, MARK = 80, 80, 64, 48, 240, 120
INTEGER, TEXT = 32, 80
WIDE = 48  # for a shape of four to eight dimensions, in addition to a tuple
SOME_PAIRS, SOME_ITEMS = 176, 64  # for the first five pairs of a dict, the first four items of a list
PAIR, ITEM, ELEMENT = 160, 18, 140
HEAVY = 160  # for the entry of a memoized tuple in the walk's own dict

_GET = b"(?:j....|h.)"
INTEGERS = b"(?:M..|K.|J....|\x8a(?:\x05.....|\x06......|\x04....|\x07.......))"
SIZES = b"(?:(?:%b){1,3}+[\x85-\x87]|\\((?:%b){4,8}+t)" % (INTEGERS, INTEGERS)


def _record(memo: bytes) -> re.Pattern[bytes]:
    """Return the pattern of an object with a few plain fields, up to two of them shapes: a row of metadata.

    Its groups are the shapes. `memo` is the opcode after each memoized object.
    """
    plain = b"(?:%b(?:%b(?![MKJ\x8a(])|%b|N))" % (_GET, _GET, INTEGERS)
    shape = b"(%b%b%b%b\x85%bR%b)" % (_GET, _GET, SIZES, memo, memo, memo)
    pairs = b"%b{0,3}+(?:%b%b?+(?:%b%b?+)?)?" % (plain, shape, plain, shape, plain)
    return re.compile(b"%b\\)\x81%b}%b\\(%bub" % (_GET, memo, memo, pairs), re.DOTALL)


REMEMBERING, FORGETTING = _record(b"\x94"), _record(b"")
IN_RECORD = [2 + 3 * shapes for shapes in range(3)]  # memoized parts of a record, by number of shapes
RECORDS = {  # the price by number of shapes; objects that are not memoized are not kept
    REMEMBERING: [
        RECORD + DICT + PUSHED + shapes * (TUPLE + SINGLE) + count * REMEMBERED
        for shapes, count in enumerate(IN_RECORD)
    ],
    FORGETTING: [RECORD + PUSHED + shapes * TUPLE for shapes in range(3)],
}
# Opcodes that push one object, without a relevant argument: their length, and the price.
PUSHES = {
    **dict.fromkeys(b"N\x88\x89)", (1, 0)),
    ord("K"): (2, 0),
    ord("M"): (3, INTEGER),
    ord("J"): (5, INTEGER),
    ord("G"): (9, INTEGER),
    ord("]"): (1, LIST),
    ord("}"): (1, DICT),
    0x8F: (1, SET),
}
# Opcodes that make one object from several: the number of those, and the price.
MAKES = {
    ord("R"): (2, CALL),
    0x81: (2, RECORD),
    0x92: (3, CALL),
    ord("Q"): (1, CALL),
    0x93: (2, CLASS),
    0x85: (1, TUPLE),
    0x86: (2, TUPLE),
    0x87: (3, TUPLE),
}
# Opcodes that take all objects above a mark: the price, and the price per object.
COLLECTS = {
    ord("u"): (SOME_PAIRS, PAIR // 2),
    ord("d"): (DICT + SOME_PAIRS, PAIR // 2),
    ord("e"): (SOME_ITEMS, ITEM),
    ord("l"): (LIST + SOME_ITEMS, ITEM),
    ord("t"): (TUPLE, 8),
    ord("o"): (CALL, 8),
    ord("1"): (0, 0),
    0x90: (0, ELEMENT),
    0x91: (SET, ELEMENT),
}
# Opcodes whose argument begins with its length: format of the length, and most bytes of memory per byte of argument.
SIZED = {
    **dict.fromkeys(b"UC", ("<B", 1)),
    **dict.fromkeys(b"TB", ("<L", 1)),
    **dict.fromkeys(b"\x8e\x96", ("<Q", 1)),
    0x8C: ("<B", 5),
    ord("X"): ("<L", 5),
    0x8D: ("<Q", 5),
    0x8A: ("<B", 2),
    0x8B: ("<L", 2),
}


class TooMuch(ValueError):
    """A pickle that takes more memory than allowed."""


class Budget:
    """Remaining memory for one pickle, in bytes."""

    __slots__ = ("left", "limit")

    def __init__(self, limit: int | None = None) -> None:
        allowed = os.environ.get(VARIABLE, "")
        default = int(allowed) * 2**20 if allowed.isdecimal() else MEMORY
        self.limit = self.left = default if limit is None else limit

    def take(self, nbytes: int, what: str) -> None:
        """Take bytes from the budget; `what` names their use in the error.

        Raises:
            TooMuch: not enough bytes are left.
        """
        self.left -= nbytes
        if self.left < 0:
            more = f"a larger `{VARIABLE}` in the environment allows it"
            raise TooMuch(f"it takes more than {self.limit:,} bytes of memory, with {what} ({more})")
