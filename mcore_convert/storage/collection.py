"""Garbage collection, switched off for work that creates many objects and no garbage."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

FEW = 10_000  # objects that a collection traverses in a millisecond or two: counting frozen objects takes longer


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """A scope without cyclic garbage collection: traversing hundreds of thousands of new objects is slow.

    The objects that it leaves are moved to the oldest generation: otherwise Python would traverse all of them, twice,
    when the scope ends.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if gc.get_count()[0] > FEW and not gc.get_freeze_count():  # keep what a caller has frozen
                gc.freeze()
                gc.unfreeze()
            gc.enable()
