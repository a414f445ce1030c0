"""Objects that packages register under an entry point. One that cannot be loaded breaks only commands that use it."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Any, Generic, TypeVar

logger = logging.getLogger(__name__)

REPAIR = "repair or uninstall the package that has it"

Kind = TypeVar("Kind")


@dataclass(frozen=True)
class Plugins(Generic[Kind]):
    """Objects of a group in the order of their entry points, and by name why others cannot be used, one line each."""

    objects: tuple[Kind, ...]
    broken: dict[str, str]


def load(points: Iterable[EntryPoint], kind: type[Kind], noun: str) -> Plugins[Kind]:
    """Load the entry points of a group; those that cannot be used are left out with a warning.

    Args:
        kind: the class that each object must be of; it has a `name`, which must be that of the entry point.
        noun: name of such objects in messages.
    """
    objects, broken = [], {}
    for point in points:
        try:
            each: Any = point.load()
        except Exception as error:  # code of another package may raise anything
            reason = f"{type(error).__name__}: {error}"
        else:
            if isinstance(each, kind) and getattr(each, "name", point.name) == point.name:
                objects.append(each)
                continue
            reason = f"`{point.value}` is no {noun} of that name"
        broken[point.name] = f"the {noun} `{point.name}`{_package(point)} cannot be loaded: {reason}"
        logger.warning("%s", broken[point.name])
    return Plugins(tuple(objects), broken)


def _package(point: EntryPoint) -> str:
    return "" if point.dist is None else f" of the package `{point.dist.name}`"
