"""Work that makes many objects and no garbage."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

FEW = 10_000  # objects that Python searches in a millisecond or two: less than what is frozen takes to be counted


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """A scope in which Python collects no cycles: searching new objects by the hundred thousand takes longest.

    What it leaves counts as old: else Python would search all of it, twice, when the scope ends.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if gc.get_count()[0] > FEW and not gc.get_freeze_count():  # what a caller has frozen stays so
                gc.freeze()
                gc.unfreeze()
            gc.enable()
