"""Files that are reserved: what is known of them, in as few writes as pay."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mcore_convert.formats.megatron.flat import local_of, slots_in_global
from mcore_convert.spec.shard import GATED_COLUMN, Box
from mcore_convert.storage.disk import reserve
from mcore_convert.storage.views import Slot, TensorMeta, View


def test_neighbours_are_written_at_once_and_nothing_else_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those far apart, out of order, or one over the other stay writes of their own."""
    literals = [(3, b"ab"), (5, b"c"), (40, b"d"), (500, b"e"), (200, b"f"), (200, b"g"), (990, b"h")]
    wanted = bytearray(1000)
    for at, content in literals:
        wanted[at : at + len(content)] = content
    written: list[int] = []
    pwrite = os.pwrite

    def counted(descriptor: int, content: bytes, at: int) -> int:
        written.append(at)
        return pwrite(descriptor, content, at)

    monkeypatch.setattr(os, "pwrite", counted)
    reserve(tmp_path / "file", 1000, literals)
    assert (tmp_path / "file").read_bytes() == wanted
    assert written == [0, 500, 200, 200, 990]
    reserve(tmp_path / "empty", 7, [])
    assert (tmp_path / "empty").read_bytes() == bytes(7)


def test_boxes_of_a_local_tensor_are_found_again(tmp_path: Path) -> None:
    """The same answer where it is remembered: whole, a part, and rows of both gate and up."""
    local = local_of(GATED_COLUMN, (8, 3), 2, 1)
    whole = View.of(tmp_path, 0, TensorMeta((4, 3), "float32"))
    rows = Box((1, 0), (2, 3))
    for _ in range(2):
        (gate, up) = slots_in_global([Slot(whole, Box.whole((4, 3)))], local)
        assert (gate.box, up.box) == (Box((2, 0), (2, 3)), Box((6, 0), (2, 3)))
        assert (gate.view.offset, up.view.offset, up.view.shape) == (0, 24, (2, 3))
        one, other = slots_in_global([Slot(whole.narrow(rows), rows)], local)
        assert (one.box, other.box) == (Box((3, 0), (1, 3)), Box((6, 0), (1, 3)))
        assert (one.view.offset, other.view.offset) == (12, 24)
