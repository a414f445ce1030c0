"""Limits of an unpickled tree, checked before any recursion into it."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from typing import Any

from mcore_convert.formats.files.pickle_records import Record, TensorRef
from mcore_convert.spec.config.arguments import TorchDtype

MAX_DEPTH = 200  # of objects in a checkpoint, except its metadata
MAX_PARTS = 20_000_000  # of the same, with every occurrence of a part counted
PLAIN = frozenset({str, bytes, int, float, bool, type(None)})  # the types of most keys
LEAVES = PLAIN | {TensorRef}
KEYS = (str, bytes, int, float, TorchDtype, type(None))


def check_tree(tree: Any) -> None:
    """Check that recursion into an unpickled tree is safe: limited depth, no cycles, limited size with repeated parts.

    Raises:
        ValueError: it is not safe, or it has a key that is not a plain value.
    """
    sizes: dict[int, int] = {}  # of finished parts, with every occurrence of a part counted
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
            pending += [(child, False) for child in children if type(child) not in LEAVES]


def _children(part: Any) -> list[Any] | None:
    if isinstance(part, dict):
        check_keys(part)
        return list(part.values())
    if isinstance(part, list | tuple):
        return list(part)
    if isinstance(part, set | frozenset):
        check_keys(part)
        return []
    if isinstance(part, argparse.Namespace):
        return list(vars(part).values())
    if isinstance(part, Record):
        names = [name for kind in type(part).__mro__ for name in getattr(kind, "__slots__", ())]
        return [getattr(part, name) for name in names if hasattr(part, name)]
    return None


def check_keys(keys: Collection[Any]) -> None:
    """Check that the keys of a dict, or the items of a set, are plain values or tuples of them.

    Raises:
        ValueError: one is not.
    """
    if {*map(type, keys)} <= PLAIN:
        return
    for key in keys:
        for each in key if type(key) is tuple else (key,):
            if type(each) is tuple or not isinstance(each, KEYS):
                raise ValueError(f"it has a key that is a {type(each).__name__}")
