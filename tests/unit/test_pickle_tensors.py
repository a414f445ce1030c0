"""Tensors in pickles are stepped over at once, and priced as opcode by opcode."""

from __future__ import annotations

import io
import zipfile

import pytest
import torch

from mcore_convert.formats.files.pickle_prices import Budget
from mcore_convert.formats.files.pickle_tensors import tensor_at
from mcore_convert.formats.files.pickle_walk import _Walk, end_of


def stored(count: int) -> bytes:
    """Return the pickle that torch writes of tensors of one to eight dimensions, and one of none."""
    file = io.BytesIO()
    torch.save({f"layer.{n}": torch.zeros([2] * (n % 9), dtype=torch.bfloat16) for n in range(count)}, file)
    return zipfile.ZipFile(file).read("archive/data.pkl")


def walked(data: bytes) -> _Walk:
    walk = _Walk(data)
    walk.run(2**40)
    return walk


def test_what_torch_writes_is_priced_as_opcode_by_opcode(monkeypatch: pytest.MonkeyPatch) -> None:
    data = stored(300)
    quick = walked(data)
    tensors = [at for at in range(len(data)) if data[at] in b"hj" and tensor_at(data, at)]
    assert len(tensors) > 250
    monkeypatch.setattr("mcore_convert.formats.files.pickle_walk.tensor_at", lambda *_: None)
    slow = walked(data)
    assert (quick.at, quick.is_done, quick.numbers, quick.remembered) == (slow.at, True, slow.numbers, slow.remembered)
    assert quick.spent == pytest.approx(slow.spent, rel=0.02)


def tensor(function: int, first: int, *, of: int = 1) -> bytes:
    """Return a tensor's opcodes: what is called, the number of what it puts first, and what its parts are."""
    puts = [b"r" + number.to_bytes(4, "little") for number in range(first, first + 7)]
    got = b"j" + of.to_bytes(4, "little")
    storage = got + got + b"X\x01\0\0\x000" + puts[0] + got + b"K\x01t" + puts[1] + b"Q"
    shapes = b"K\0K\x02K\x03\x86" + puts[2] + b"K\x03K\x01\x86" + puts[3] + b"\x89"
    rest = got + b")R" + puts[4] + b"t" + puts[5] + b"R" + puts[6]
    return b"j" + function.to_bytes(4, "little") + b"((" + storage + shapes + rest


def test_tensors_that_hold_each_other_are_not_stepped_over() -> None:
    """Or the hash of the last, which visits each many times over, would seem to visit a few."""
    atom = b"X\x01\0\0\0ar\x01\0\0\0"
    assert tensor_at(tensor(1, 50), 0) is not None
    data = b"\x80\x02}" + atom + b"0" + b"N0" * 400
    last = 1
    for level in range(12):
        data += tensor(1, 50 + 7 * level, of=last) + b"0"
        last = 51 + 7 * level  # the tuple that names its storage
    data += b"j" + last.to_bytes(4, "little") + b"Ns."
    with pytest.raises(ValueError, match="a key of more than"):
        end_of(data, Budget())


def test_a_number_that_is_taken_is_not_given_again() -> None:
    """What was an atom under that number would be one no more, unseen."""
    data = b"\x80\x02" + b"N0" * 400 + b"".join(b"X\x01\0\0\0ar" + bytes([n, 0, 0, 0]) + b"0" for n in range(1, 60))
    walk = walked(data + tensor(1, 50))
    assert walk.at == len(data + tensor(1, 50))
    assert not {51, 52, 53, 54, 55, 56} & walk.atoms
