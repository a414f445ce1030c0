"""The opcodes of one tensor in torch's pickles, as one pattern: a checkpoint has up to a hundred thousand tensors."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from mcore_convert.formats.files.pickle_prices import CALL, INTEGER, INTEGERS, MARK, PUSHED, SIZES, TEXT, TUPLE, WIDE

VISITED = 27  # most parts that hashing the arguments of a tensor visits

# `_rebuild_tensor_v2((storage, class, name, location, count), offset, sizes, strides, requires_grad, OrderedDict())`
# (torch, `torch/_tensor.py`). The groups are the memo's GETs, its PUTs, and both shapes.
_NAME = b"X(?:%b)" % b"|".join(b"%b\0\0\0[0-9]{%d}" % (bytes([length]), length) for length in range(1, 8))
_GET, _PUT, _SHAPE = b"(h.|j....)", b"(q.|r....)?", rb"(%b|\))" % SIZES
_STORAGE = _GET + _GET + b"(?:%b%b|%b)" % (_NAME, _PUT, _GET) + _GET + INTEGERS + b"t" + _PUT + b"Q"
_ARGUMENTS = INTEGERS + _SHAPE + _PUT + _SHAPE + _PUT + b"[\x88\x89]" + _GET + rb"\)R" + _PUT
_TENSOR = re.compile(rb"%b\(\(%b%bt%bR%b" % (_GET, _STORAGE, _ARGUMENTS, _PUT, _PUT), re.DOTALL)
_GETS, _PUTS, _SHAPES = (1, 2, 3, 5, 6, 12), (4, 7, 9, 11, 13, 14, 15), (8, 10)
_PRICE = 17 * PUSHED + 2 * MARK + TEXT + 7 + 2 * INTEGER + 3 * CALL + 2 * TUPLE + 11 * 8 + 2 * (MARK + TUPLE + WIDE)
_DIMENSION = INTEGER + PUSHED + 8


class Tensor(NamedTuple):
    """The opcodes of a tensor: memo numbers that they get and put, their price in bytes, and their end."""

    gets: tuple[int, ...]
    puts: tuple[int, ...]
    price: int
    end: int


def tensor_at(data: bytes, at: int) -> Tensor | None:
    """Return the tensor that begins at `at`; None for another form, such as one with hooks."""
    tensor = _TENSOR.match(data, at)
    if tensor is None:
        return None
    first, second = tensor.group(*_SHAPES)
    dimensions = (len(first) + len(second)) // 2  # each has at least two bytes
    gets, puts = _same_numbers(tensor.group(*_GETS)), _numbers(tensor.group(*_PUTS))
    return Tensor(gets, puts, _PRICE + _DIMENSION * dimensions, tensor.end())


def _numbers(opcodes: tuple[bytes | None, ...]) -> tuple[int, ...]:
    """Return the memo numbers in the arguments of opcodes."""
    return tuple([int.from_bytes(each[1:], "little") for each in opcodes if each])


_same_numbers = lru_cache(maxsize=1024)(_numbers)  # the tensors of a file refer to the same names and classes
