"""Tensors of one file that share bytes: allowed if they are identical, damage otherwise."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mcore_convert.errors import UnreadableCheckpoint, fold
from mcore_convert.storage.views import View


def refuse_shared(path: Path, views: Mapping[str, View]) -> None:
    """Check that any two tensors are identical, as tied ones are, or disjoint.

    Raises:
        UnreadableCheckpoint: different tensors share a byte.
    """
    held = sorted([(view.offset, view.end, name) for name, view in views.items() if view.nbytes])
    shared = []
    for (start, end, name), (following, _, other) in itertools.pairwise(held):
        if following < end and views[name] != views[other]:
            shared.append(f"{name} and {other}, at byte {start:,}")
    if shared:
        raise UnreadableCheckpoint(f"`{path}` has different tensors at one place", items=fold(shared))


def views_in(tree: Any, name: str = "") -> Iterator[tuple[str, View]]:
    """Yield every tensor of a tree from a torch file with its path in the tree, such as `model.decoder.weight`."""
    if isinstance(tree, View):
        yield name, tree
        return
    parts: Any = ()
    if isinstance(tree, dict):
        parts = tree.items()
    elif isinstance(tree, list | tuple):
        parts = enumerate(tree)
    elif isinstance(tree, argparse.Namespace):
        parts = vars(tree).items()
    for key, part in parts:
        yield from views_in(part, f"{name}.{key}" if name else str(key))
