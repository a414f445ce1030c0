"""Proof of a target before it gets its name: the directory is reopened from its own headers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mcore_convert.checkpoints.identify import open_checkpoint
from mcore_convert.conversion.plan import Plan
from mcore_convert.errors import ConvertError, UnwritableTarget, fold
from mcore_convert.formats.base import Checkpoint, Findings
from mcore_convert.storage.collection import without_collection
from mcore_convert.storage.paths import moved
from mcore_convert.storage.views import Slot, file_errors

FAULTY_HINT = "is the disk or the memory faulty? nothing was left behind"


@without_collection()
def check_reopened(plan: Plan, partial: Path) -> None:
    """Prove that the headers in `partial` match the reservation of the plan: each tensor, its dtype, shape and place.

    Raises:
        UnwritableTarget: they do not match, or cannot be read.
    """
    reserved = plan.target
    try:
        with file_errors():
            written = open_checkpoint(partial)
            written.check_whole()
            wrong = list(_differences(plan, partial, written))
    except ConvertError as error:
        raise UnwritableTarget(
            f"what was written to `{partial}` cannot be read again: {error.message}",
            items=error.items,
            hint=FAULTY_HINT,
        ) from error
    if written.format != reserved.format:
        wrong.append(f"the format is `{written.format}` and not `{reserved.format}`")
    if wrong:
        raise UnwritableTarget(
            f"what was written to `{partial}` is not what a reader finds there", items=fold(wrong), hint=FAULTY_HINT
        )


def _differences(plan: Plan, partial: Path, written: Checkpoint) -> Iterator[str]:
    """Yield the keys and the weights that are misplaced."""
    wanted, actual = plan.target.tensors, written.tensors
    yield from (key for key in {**wanted, **actual} if wanted.get(key) != actual.get(key))
    final = plan.reservation.path

    def there(path: Path) -> Path:
        return moved(path, final, partial)

    findings = Findings()
    for item, _, slots, replicas in plan.moves:
        reserved = [Slot(slot.view.moved(there), slot.box) for slot in (*slots, *replicas)]
        copies = (slot for slot, _ in written.replicas(item, plan.dims))
        places = [*written.locate(item, plan.dims, findings), *copies]
        if reserved != places and sorted(reserved) != sorted(places):
            yield str(item)
