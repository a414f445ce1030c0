"""Conditions on the data of a checkpoint, proven block by block."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mcore_convert.errors import ConvertError
from mcore_convert.storage.elements import CAST_BLOCK, Files, blocks_of, differing
from mcore_convert.storage.rounding import Tolerance, are_masters
from mcore_convert.storage.threads import in_threads
from mcore_convert.storage.views import View


@dataclass(frozen=True)
class Check:
    """Condition that must hold before anything is written: `view` is all zero, or equals `other`.

    `rounded`: `view` is fp32 and must equal `other` after rounding to its dtype, as a master copy does; where the
    weights were rounded to less than that dtype, `near` is the tolerance.
    """

    view: View
    other: View | None
    failure: str
    rounded: bool = False
    hint: str | None = None
    near: Tolerance | None = None


def prove(checks: Iterable[Check]) -> None:
    """Run checks on the data.

    Raises:
        ConvertError: the first check that fails, with its own message.
    """
    with Files() as files:
        in_threads(lambda check: _check(check, files), checks)


def _check(check: Check, files: Files) -> None:
    if check.other is not None and check.rounded:
        blocks = blocks_of(check.view.shape, check.view.itemsize, CAST_BLOCK)
        failed = any(not _rounds(check, check.other, files, block) for block in blocks)
    elif check.other is not None:
        failed = next(differing(files, check.view, check.other), None) is not None
    else:
        blocks = blocks_of(check.view.shape, check.view.itemsize, CAST_BLOCK)
        failed = any(bool(files.read(check.view.block(block)).any()) for block in blocks)
    if failed:
        raise ConvertError(check.failure, hint=check.hint)


def _rounds(check: Check, other: View, files: Files, block: tuple[slice, ...]) -> bool:
    """Return whether a block of master copies rounds to the same block of its weight."""
    masters, weights = files.read(check.view.block(block)), files.read(other.block(block))
    return are_masters(masters, weights, other.dtype, check.near)
