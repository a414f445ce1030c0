"""Tensors gathered by weight and by layer, for lines and tables."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar


class OfWeight(Protocol):
    """Description of one tensor."""

    @property
    def name(self) -> str: ...
    @property
    def weight(self) -> str: ...
    @property
    def layer(self) -> int | None: ...
    @property
    def expert(self) -> int | None: ...
    @property
    def state(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


Described = TypeVar("Described", bound=OfWeight)


def folded(members: Iterable[Described]) -> list[list[Described]]:
    """Group the descriptions by weight and state, over all layers and experts, in order of first appearance."""
    groups: dict[tuple[str, str], list[Described]] = {}
    for each in members:
        groups.setdefault((each.weight, each.state), []).append(each)
    return list(groups.values())


def in_layers(members: Iterable[Described]) -> dict[int, list[Described]]:
    """Group descriptions by layer, in ascending order; with experts a layer has several tensors."""
    layers: dict[int, list[Described]] = {}
    for each in members:
        if each.layer is not None:
            layers.setdefault(each.layer, []).append(each)
    return dict(sorted(layers.items()))
