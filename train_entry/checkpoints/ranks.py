"""Agreement of ranks: an error on one of them is raised on all of them, and none waits for one that gave up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from mcore_convert.errors import ConvertError
from train_entry.initialize import OtherRankError

T = TypeVar("T")

# Time that ranks wait for one that converts or writes. A dead rank is noticed at once: gloo loses its connection.
PATIENCE = timedelta(days=1)


@dataclass(frozen=True)
class Ranks:
    """All ranks of the run, in a gloo group of their own: host memory only, apart from the messages of training.

    Threads that communicate at the same time need a group each.
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
        """Return the result of `function()` on rank 0, where alone it is called, for all ranks. It must be picklable.

        Raises:
            Exception: the exception of rank 0; on the others an `OtherRankError` with its message.
        """
        mine, error = _tried(function) if self.is_first else (None, None)
        answer: list[Any] = [mine, error and _error_elsewhere(error, 0)]
        dist.broadcast_object_list(answer, group=self.group, group_src=0)
        if answer[1] is not None:
            raise error or answer[1]
        result: T = answer[0]
        return result

    def every(self, function: Callable[[], T]) -> T:
        """Return the result of `function()` on this rank, once it has returned on all.

        Raises:
            Exception: that of the first rank that raised one; on the others an `OtherRankError` with its message.
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
        """Return a refusal that all ranks have met, for all to raise and rank 0 to report."""
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
