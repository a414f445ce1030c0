"""A torch file as a tree with holes: the object to save, with a `Hole` in place of each tensor."""

from __future__ import annotations

import argparse
import struct
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_convert.formats.files import torch_archive as torch_file
from mcore_convert.formats.request import Reservation
from mcore_convert.storage.views import TensorMeta, View


@dataclass(frozen=True, eq=False)
class Hole:
    """A tensor to fill, or with known bytes. One hole in several places is one storage."""

    meta: TensorMeta
    content: bytes | None = None

    @staticmethod
    def number(value: float, shape: tuple[int, ...] = ()) -> Hole:
        """Return a tensor of one fp32 number."""
        return Hole(TensorMeta(shape, "float32"), struct.pack("<f", value))


@dataclass(frozen=True)
class TreeLayout:
    """Layout of a tree's file for any path: files of ranks that differ only in values are laid out once."""

    tree: Any
    holes: Mapping[Hole, int]  # the number of each, in the order of the archive
    archive: torch_file.Archive

    @staticmethod
    def of(tree: Any) -> TreeLayout:
        """Lay out the file of a tree."""
        holes: dict[Hole, int] = {}
        replaced(tree, lambda hole: holes.setdefault(hole, len(holes)))
        archive = torch_file.lay_out(
            lambda refs: replaced(tree, lambda hole: refs[holes[hole]]), [hole.meta for hole in holes]
        )
        return TreeLayout(tree, holes, archive)

    def reserve(self, path: Path, reservation: Reservation) -> Any:
        """Reserve a file, and return the tree with the view of every hole."""
        archive = self.archive
        views = {hole: View.of(path, archive.holes[number], hole.meta) for hole, number in self.holes.items()}
        reservation.sizes[path] = archive.size
        reservation.literals += [(path, at, content) for at, content in archive.literals]
        reservation.literals += [(path, views[each].offset, each.content) for each in views if each.content is not None]
        return replaced(self.tree, views.__getitem__)


def reserve_tree(path: Path, tree: Any, reservation: Reservation) -> Any:
    """Lay out a file for a tree, and return the tree with the view of every hole."""
    return TreeLayout.of(tree).reserve(path, reservation)


def replaced(tree: Any, by: Callable[[Hole], Any]) -> Any:
    """Return the tree with every hole replaced; dicts, lists, tuples and Namespaces are rebuilt.

    Equal strings become one object, since a pickle refers back to objects: equal trees have equal bytes.
    """
    if isinstance(tree, Hole):
        return by(tree)
    if isinstance(tree, str):
        return sys.intern(tree)
    if isinstance(tree, dict):
        return {  # fast path for state dicts, which have tens of thousands of names and holes
            sys.intern(key) if type(key) is str else replaced(key, by): by(value)
            if type(value) is Hole
            else replaced(value, by)
            for key, value in tree.items()
        }
    if isinstance(tree, argparse.Namespace):
        return argparse.Namespace(**replaced(vars(tree), by))
    if type(tree) in (list, tuple):
        return type(tree)(replaced(value, by) for value in tree)
    return tree
