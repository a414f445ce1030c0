"""Pickles that name classes without loading them: read by Python, and byte for byte what Python writes of the rest."""

from __future__ import annotations

import argparse
import io
import pickle
from collections import OrderedDict
from fractions import Fraction
from typing import Any

import pytest

from mcore_convert.formats.files.pickle_writer import HOLE, Call, Global, Instance, Rows, dumps
from mcore_convert.formats.files.pickles import StorageRef, TensorRef

EDGES = [0, 1, 255, 256, 65535, 65536, 2**31 - 1, 2**31, -1, -(2**31), -(2**31) - 1, 2**63, 10**700, -(10**30)]
PLAIN: list[Any] = [
    *EDGES,
    *((edge,) for edge in EDGES),
    (EDGES[0], EDGES[3], EDGES[5], EDGES[7]),
    (True, 1, None),
    (1, True, 1.5, (), (2,)),
    [(0, 1), (False, True), (0.0, 1.0)],
    [list(range(count)) for count in (0, 1, 2, 999, 1000, 1001, 2000, 2001)],
    {number: (number, -number) for number in range(2001)},
    {1: 2},
]


@pytest.mark.parametrize("tree", PLAIN, ids=lambda tree: str(tree)[:20])
def test_numbers_and_containers_are_written_as_python_writes_them(tree: Any) -> None:
    buffer = io.BytesIO()
    writer = pickle.Pickler(buffer, protocol=2)
    writer.fast = True  # every object once for each place, as here
    writer.dump(tree)
    assert dumps(tree) == buffer.getvalue()


@pytest.mark.parametrize(
    "tree",
    [
        [str(number) for number in range(600)] * 2,
        "é\ud800",
        argparse.Namespace(a=1, b="a"),
        {1, 2},
        {"a": b"abc", "b": bytearray(b"x"), "c": 3 + 4j},
        [OrderedDict(a=1), frozenset([1]), OrderedDict(a=1), "a"],
    ],
    ids=lambda tree: type(tree).__name__,
)
def test_python_reads_what_is_written(tree: Any) -> None:
    assert pickle.loads(dumps(tree)) == tree


def test_names_and_strings_are_written_once() -> None:
    """Equal ones, whether or not they are one object."""
    fraction = Instance(Global("fractions", "Fraction"), None)
    several = dumps([Call(Global("fractions", "Fraction"), (1, 2)), fraction, "".join(["h", "i"]), "".join(["hi"])])
    assert several.count(b"Fraction") == several.count(b"hi") == 1
    assert pickle.loads(several)[0].denominator == 2


def test_a_record_of_ours_that_cannot_be_named_is_refused() -> None:
    """Whoever reads the file does not have the class."""
    with pytest.raises(TypeError, match="cannot be written"):
        dumps({"a": {StorageRef("0", "float32", 1)}})
    with pytest.raises(TypeError, match="cannot be written"):
        dumps(OrderedDict(a=TensorRef(StorageRef("0", "float32", 1), 0, (1,), (1,))))


def test_rows_are_written_as_the_objects_that_they_stand_for() -> None:
    """In batches, with names and strings that are written once, and values of every kind."""
    fraction = Global("fractions", "Fraction")
    rows = [(f"key {number % 3}", (number, number + 70000), number - 1) for number in range(2500)]
    filled = Instance(Global("argparse", "Namespace"), {"a": HOLE, "b": [Call(fraction, (1, HOLE))]})
    listed = Rows(((filled, ((text, 2**40 + number) for text, _, number in rows)),))
    keyed = Rows(
        (((HOLE, Call(Global("builtins", "tuple"), (HOLE,))), ((n, pair) for _, pair, n in rows)),), is_dict=True
    )
    from_rows, by_number = pickle.loads(dumps([listed, keyed]))
    assert [(each.a, each.b) for each in from_rows] == [(text, [Fraction(1, 2**40 + n)]) for text, _, n in rows]
    assert by_number == {number: pair for _, pair, number in rows}
    several = Rows(
        ((HOLE, [(1,)]), (Instance(Global("argparse", "Namespace"), {"a": HOLE}), [("x",), ("x",)]), (HOLE, []))
    )
    namespace = argparse.Namespace(a="x")
    assert pickle.loads(dumps(several)) == [1, namespace, namespace]
