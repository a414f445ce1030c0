"""The proof of a target before it gets its name: opened anew from its own headers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from mcore_convert.checkpoints.identify import open_checkpoint
from mcore_convert.conversion.plan import Plan
from mcore_convert.errors import ConvertError, UnwritableTarget, fold
from mcore_convert.formats.base import Checkpoint, Findings
from mcore_convert.spec.dims import Dims
from mcore_convert.spec.family import Item
from mcore_convert.storage.paths import moved
from mcore_convert.storage.views import Slot, file_errors

FAULTY_HINT = "is the disk or the memory faulty? nothing was left behind"


def check_reopened(plan: Plan, partial: Path) -> None:
    """Prove that the headers in `partial` say what the plan has reserved: each tensor, its dtype, shape and place.

    Raises:
        UnwritableTarget: they do not, or cannot be read.
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
    """The keys and the weights that are not where they should be."""
    final = plan.reservation.path
    wanted, found = plan.target.tensors, written.tensors
    yield from (key for key in {**wanted, **found} if wanted.get(key) != found.get(key))
    for item in (move.item for move in plan.moves):
        if _places(plan.target, item, plan.dims, final) != _places(written, item, plan.dims, partial):
            yield str(item)


def _places(checkpoint: Checkpoint, item: Item, dims: Dims, root: Path) -> list[Slot]:
    """Where a checkpoint has a weight and its replicas, with paths relative to its own."""
    copies = (slot for slot, _ in checkpoint.replicas(item, dims))
    return sorted(_relative([*checkpoint.locate(item, dims, Findings()), *copies], root))


def _relative(slots: Iterable[Slot], root: Path) -> Iterator[Slot]:
    for slot in slots:
        yield slot._replace(view=slot.view.moved(lambda path: moved(path, root, Path())))
