"""Conditions on the data of a checkpoint, proven block by block."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from mcore_convert.errors import ConvertError
from mcore_convert.storage.elements import CAST_BLOCK, WORKERS, Files, blocks_of, differing
from mcore_convert.storage.rounding import rounds_to
from mcore_convert.storage.views import View


@dataclass(frozen=True)
class Check:
    """Something that must hold before anything is written: `view` is all zero, or equals `other`.

    `rounded`: `view` is fp32 and equals `other` when rounded to its dtype, as a master copy does.
    """

    view: View
    other: View | None
    failure: str
    rounded: bool = False
    hint: str | None = None


def prove(checks: Iterable[Check]) -> None:
    """Run checks on the data.

    Raises:
        ConvertError: the first that fails, in its own words.
    """
    with Files() as files, ThreadPoolExecutor(WORKERS) as pool:
        for _ in pool.map(lambda check: _check(check, files), checks):
            pass


def _check(check: Check, files: Files) -> None:
    if check.other is not None and check.rounded:
        exact, rounded = check.view, check.other
        failed = any(
            not rounds_to(files.read(exact.block(block)), files.read(rounded.block(block)), rounded.dtype).all()
            for block in blocks_of(exact.shape, exact.itemsize, CAST_BLOCK)
        )
    elif check.other is not None:
        failed = next(differing(files, check.view, check.other), None) is not None
    else:
        blocks = blocks_of(check.view.shape, check.view.itemsize, CAST_BLOCK)
        failed = any(bool(files.read(check.view.block(block)).any()) for block in blocks)
    if failed:
        raise ConvertError(check.failure, hint=check.hint)
