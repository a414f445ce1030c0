"""Ranks that agree: what one of them found wrong is raised on all of them, and none waits for one that gave up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from mcore_convert.errors import ConvertError
from train_entry.initialize import OtherRankError

T = TypeVar("T")

# How long ranks wait for one that converts or writes. A rank that died is noticed at once: gloo loses its connection.
PATIENCE = timedelta(days=1)


@dataclass(frozen=True)
class Ranks:
    """All ranks of the run, in a gloo group of their own: host memory only, and no message of training in between.

    What several threads do at once needs a group for each.
    """

    group: Any

    @staticmethod
    def all() -> Ranks:
        """Return a new group of all ranks, which make it together."""
        return Ranks(dist.new_group(backend="gloo", timeout=PATIENCE))

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return dist.get_rank(self.group) == 0

    def first(self, function: Callable[[], T]) -> T:
        """Return what `function()` returns on rank 0, for all ranks. It is called there alone;
        its result must be picklable.

        Raises:
            Exception: what rank 0 raised; on the others an `OtherRankError` that says it.
        """
        mine, error = _tried(function) if self.is_first else (None, None)
        answer: list[Any] = [mine, error and _error_elsewhere(error, 0)]
        dist.broadcast_object_list(answer, group=self.group, group_src=0)
        if answer[1] is not None:
            raise error or answer[1]
        result: T = answer[0]
        return result

    def every(self, function: Callable[[], T]) -> T:
        """Return what `function()` returns on this rank, once it has returned on all.

        Raises:
            Exception: what it raised on the first rank on which it did; on the others an `OtherRankError` that says it.
        """
        result, error = _tried(function)
        rank = dist.get_rank(self.group)
        errors: list[OtherRankError | None] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(errors, error and _error_elsewhere(error, rank), group=self.group)
        first = next((other for other, each in enumerate(errors) if each is not None), None)
        if first is not None:
            raise error if error is not None and first == rank else errors[first] or RuntimeError
        returned: T = result
        return returned

    def once(self, refusal: ConvertError) -> ConvertError:
        """Return a refusal that all ranks have met, to be raised on all and reported by rank 0."""
        return refusal if self.is_first else _error_elsewhere(refusal, 0)


def _tried(function: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return function(), None
    except Exception as error:
        return None, error


def _error_elsewhere(error: Exception, rank: int) -> OtherRankError:
    """Return the error that the other ranks raise."""
    if isinstance(error, ConvertError):
        return OtherRankError(f"on rank {rank}: {error.message}", items=error.items, hint=error.hint)
    return OtherRankError(f"on rank {rank}: {error!r}")
