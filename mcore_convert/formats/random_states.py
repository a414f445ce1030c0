"""Random states of a run's ranks, as plain values, and the layouts to which they apply."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mcore_convert.spec.layout import Layout, Rank

Place = tuple[int, ...]


@dataclass(frozen=True)
class RandomStates:
    """Random states by pipeline and tensor rank, and with experts over ranks by a third axis, `dp` or `ep`.

    `sizes` are the sizes of these axes, `ep` is the expert-parallel size. Each entry is a list as in Megatron-LM, of
    one state, or of one per data-parallel rank.
    """

    axes: tuple[str, ...]
    sizes: Place
    ep: int
    lists: Mapping[Place, list[Any]]

    def fit(self, layout: Layout, axis: str) -> bool:
        """Return whether the states are those of a layout's ranks, in a format with this third axis."""
        same = self.sizes[:2] == (layout.pp, layout.tp) and self.ep == layout.ep
        return same and self.axes == (("pp", "tp") if layout.ep == 1 else ("pp", "tp", axis))

    @property
    def words(self) -> str:
        """Description of the runs that can load the states."""
        num = self.sizes[2] if self.axes[-1] == "dp" else max(map(len, self.lists.values()))
        if num > 1:
            return f"for {num} data-parallel ranks: with another number of them resume with --no-load-rng"
        return "for the same tensor, pipeline and expert parallelism"

    def of_rank(self, rank: Rank) -> list[Any]:
        """Return the states in the file of a rank."""
        return self.lists[(rank.pp, rank.tp, rank.ep)[: len(self.axes)]]
