"""Tensors gathered by weight and by layer, for lines and tables."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar


class OfWeight(Protocol):
    """What is said of one tensor."""

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


Said = TypeVar("Said", bound=OfWeight)


def folded(said: Iterable[Said]) -> list[list[Said]]:
    """What is said of the same weight in all layers and experts together, in the order of the first."""
    groups: dict[tuple[str, str], list[Said]] = {}
    for each in said:
        groups.setdefault((each.weight, each.state), []).append(each)
    return list(groups.values())


def in_layers(said: Iterable[Said]) -> dict[int, list[Said]]:
    """What is said of each layer, by its number in ascending order: of several tensors with experts."""
    found: dict[int, list[Said]] = {}
    for each in said:
        if each.layer is not None:
            found.setdefault(each.layer, []).append(each)
    return dict(sorted(found.items()))
