"""Planning of a conversion: from two checkpoints to a list of copies, proven complete. Reads headers only.

A weight's slots in the source and in the target are boxes of the same global tensor, so every copy is an intersection
of two boxes: there is one path for every pair of formats and layouts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from mcore_convert.checkpoints.checks import Check
from mcore_convert.checkpoints.weights import Sources, without_padding
from mcore_convert.errors import MappingError
from mcore_convert.formats.base import Checkpoint, Findings
from mcore_convert.formats.request import Reservation
from mcore_convert.spec.dims import Dims
from mcore_convert.spec.family import Family, Item
from mcore_convert.spec.shard import Box, Shape, parts_in
from mcore_convert.spec.tiling import FEW, untiled
from mcore_convert.storage.sources import Stamp
from mcore_convert.storage.views import Slot, View, bytes_of


class Copy(NamedTuple):
    """Two views of equal shape: the bytes of `source` are copied to `target`."""

    source: View
    target: View


class Move(NamedTuple):
    """All copies of one weight. `slots` are its slots in the target, `replicas` further slots of the same boxes."""

    item: Item
    copies: tuple[Copy, ...]
    slots: tuple[Slot, ...] = ()
    replicas: tuple[Slot, ...] = ()


@dataclass(frozen=True)
class Plan:
    """Plan of a conversion: the reserved files and every copy. Nothing has been written.

    `sources` are the weights as they lie in the source, with the checks of their data. `num_parameters` leaves out
    padding, and counts a tied head once. `stamps` show whether a source file has changed.
    `options` are those that the user gave, as the manifest records them.
    """

    family: Family
    dims: Dims
    source: Checkpoint
    target: Checkpoint
    reservation: Reservation
    moves: tuple[Move, ...]
    sources: Sources
    notes: tuple[str, ...] = field(default=())
    num_parameters: int = 0
    stamps: Mapping[Path, Stamp] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def checks(self) -> tuple[Check, ...]:
        """Checks of the source's data that must hold before anything is written."""
        return self.sources.checks

    @property
    def source_files(self) -> set[Path]:
        """Files that tensors are copied from."""
        views = (view for move in self.moves for copy in move.copies for view in copy.source.stored)
        return {*{id(view.path): view.path for view in views}.values()}  # views of a file share its path

    @cached_property
    def nbytes(self) -> int:
        """Number of bytes of tensors that are copied."""
        return bytes_of(copy.source for move in self.moves for copy in move.copies)


class _Parts(NamedTuple):
    """Intersections of boxes: the index of the source's box, that of the target's, and the common box.

    `is_complete`: the target's boxes tile the tensor, and each element of them is filled once.
    """

    common: list[tuple[int, int, Box]]
    is_complete: bool


@lru_cache(maxsize=1024)
def _parts(sources: tuple[Box, ...], places: tuple[Box, ...], shape: Shape) -> _Parts:
    common = [(number, at, part) for at, place in enumerate(places) for number, part in parts_in(sources, place)]
    filled = sum(part.numel for *_, part in common) == Box.whole(shape).numel
    return _Parts(common, filled and untiled(places, shape) is None)


def _copied(slots: Sequence[Slot], places: Sequence[Slot], shape: Shape) -> tuple[list[Copy], bool]:
    """Return the copies that fill slots of the target from those of the source, and whether they fill the whole tensor.

    Experts and layers have equal boxes, which are compared only once.
    """
    few = len(slots) <= FEW and len(places) <= FEW
    parts = (_parts if few else _parts.__wrapped__)(
        tuple(slot.box for slot in slots), tuple(place.box for place in places), shape
    )
    return [Copy(slots[n].part(box), places[at].part(box)) for n, at, box in parts.common], parts.is_complete


def moves_between(family: Family, dims: Dims, sources: Sources, target: Checkpoint) -> tuple[Move, ...]:
    """Return the copies that fill every slot of the target, each element once.

    Raises:
        MappingError: an element of a weight would not be filled. This is a defect of the converter, not of the
            input: `find_weights` and the reservation guarantee otherwise.
    """
    findings = Findings()
    moves = []
    for item, slots in sources.slots.items():
        weight = item.weight
        shape = family.shape(weight, dims)
        located = target.locate(item, dims, findings)
        replicas = [slot for slot, _ in target.replicas(item, dims)]
        places = without_padding(weight, dims, located)
        first, is_complete = _copied(slots, places, shape)
        if not is_complete and (weight.mcore is not None or (weight.copy_of is not None and places)):
            raise MappingError(f"`{item}` would not be filled completely; please report this")
        again = _copied(slots, without_padding(weight, dims, replicas), shape)[0] if replicas else []
        moves.append(Move(item, (*again, *first), tuple(located), tuple(replicas)))
    if findings.missing or findings.misshapen:
        raise MappingError("the target was not laid out completely; please report this", items=findings.missing)
    return tuple(moves)
