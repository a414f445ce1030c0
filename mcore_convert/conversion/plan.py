"""From two checkpoints to a list of copies, with the proof that it is complete. Reads headers only.

A weight's slots in the source and in the target are boxes of the same global tensor, so every copy is an intersection
of two boxes: there is one path for every pair of formats and layouts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from mcore_convert.checkpoints.checks import Check
from mcore_convert.checkpoints.weights import Sources, without_padding
from mcore_convert.errors import MappingError
from mcore_convert.formats.base import Checkpoint, Findings
from mcore_convert.formats.request import Reservation
from mcore_convert.spec.dims import Dims
from mcore_convert.spec.family import Family, Item
from mcore_convert.spec.shard import Box
from mcore_convert.storage.sources import Stamp
from mcore_convert.storage.views import Slot, View, cut, untiled


class Copy(NamedTuple):
    """Two views of equal shape: the bytes of one go to the other."""

    source: View
    target: View


class Move(NamedTuple):
    """All copies of one weight."""

    item: Item
    copies: tuple[Copy, ...]

    @property
    def nbytes(self) -> int:
        return sum(copy.source.nbytes for copy in self.copies)


@dataclass(frozen=True)
class Plan:
    """What a conversion will do: the files it reserves, and every copy. Nothing has been written.

    `sources` are the weights as they lie in the source, with what must hold in their data. `num_parameters` leaves out
    padding, and counts a tied head once. `stamps` tell whether a source file has changed.
    `options` are what the user has asked for, as the manifest keeps it.
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
        """What must hold in the data of the source before anything is written."""
        return self.sources.checks

    @property
    def source_files(self) -> set[Path]:
        """The files that tensors are copied from."""
        return {view.path for move in self.moves for copy in move.copies for view in copy.source.stored}

    @cached_property
    def nbytes(self) -> int:
        """Bytes of tensors that are copied."""
        return sum(move.nbytes for move in self.moves)


def _copies(slots: list[Slot], place: Slot) -> list[Copy]:
    """What fills a slot of the target, from those of the source."""
    return [Copy(part.view, place.part(part.box)) for part in cut(slots, place.box)]


def moves_between(family: Family, dims: Dims, sources: Sources, target: Checkpoint) -> tuple[Move, ...]:
    """The copies that fill every slot of the target, each element once.

    Raises:
        MappingError: an element of a weight would be filled by nothing. This is a defect of the converter, not of the
            input: `find_weights` and the reservation have promised otherwise.
    """
    findings = Findings()
    moves = []
    for item, slots in sources.slots.items():
        weight = item.weight
        copies: list[Copy] = []
        places = without_padding(weight, dims, target.locate(item, dims, findings))
        again = without_padding(weight, dims, [slot for slot, _ in target.replicas(item, dims)])
        for place in again:
            copies += _copies(slots, place)
        first = [copy for place in places for copy in _copies(slots, place)]
        filled = sum(Box.whole(copy.target.shape).numel for copy in first)
        copies += first
        shape = family.shape(weight, dims)
        if (weight.mcore is not None or (weight.copy_of is not None and places)) and (
            filled != Box.whole(shape).numel or untiled([place.box for place in places], shape) is not None
        ):
            raise MappingError(f"`{item}` would not be filled completely; please report this")
        moves.append(Move(item, tuple(copies)))
    if findings.missing or findings.misshapen:
        raise MappingError("the target was not laid out completely; please report this", items=findings.missing)
    return tuple(moves)
