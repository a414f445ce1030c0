"""Running a plan: reserve the files, fill them from several threads, rename at the end.

Runs of bytes are copied by the kernel; what is transposed or cut across rows goes from one memory map to another, so
that no tensor is ever held in memory.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mcore_convert.destination import check_free, claimed, partial_path
from mcore_convert.disk import copy_file, sync, write_at, write_new
from mcore_convert.elements import WORKERS, Files, Meter, Progress, blocks_of, copy_view, differing, round_to
from mcore_convert.errors import ConvertError, UnwritableTarget
from mcore_convert.phases import phase
from mcore_convert.plan import Check, Plan
from mcore_convert.tensors import open_error

# Two threads and their blocks need next to nothing: what is anonymous is the interpreter and the plan itself.
BASE_MEMORY = 64 * 2**20

BEYOND_HINT = "--dtype bfloat16 has the range of float32"


def expected_memory(plan: Plan) -> int:
    """Upper estimate of anonymous memory in bytes: the interpreter, and about 1 kB for each copy that is planned."""
    return BASE_MEMORY + 1024 * sum(len(move.copies) for move in plan.moves)


def execute(
    plan: Plan,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
    conclude: Callable[[Path], Mapping[Path, bytes]] | None = None,
) -> None:
    """Write what a plan says. The destination appears at the end, whole, or not at all.

    Args:
        overwrite: replace a destination that exists; it stays until the new one is complete.
        progress: called with the bytes copied so far and their total, by one thread at a time.
        conclude: called with the partial directory when all tensors are in it; returns further small files, by the
            paths that they will have. What it raises leaves nothing behind.

    Raises:
        UnwritableTarget: the destination exists, is being written by another process, or there is no room.
        UnreadableCheckpoint: a check on the source's data failed, or its files changed.
    """
    final = plan.reservation.path
    check_free(final, overwrite=overwrite)
    sources = {copy.source.path for move in plan.moves for copy in move.copies} | {*plan.reservation.carried.values()}
    for place in (final, partial_path(final)):
        _refuse_overlap(place, plan.source.path, sources)
    with phase(progress, "checking"):
        prove(plan.checks)
    partial = partial_path(final)
    with _as_errors(final, sources), claimed(final, plan.reservation.nbytes, overwrite=overwrite) as claim:
        with phase(progress, "copying", plan.nbytes), Files() as files:
            _reserve(plan, partial)
            _fill(plan, files, Meter(plan.nbytes, progress))
        further = conclude(partial) if conclude else {}
        with phase(progress, "finishing"):
            _finish(plan, partial, further)
            claim.publish()


@contextlib.contextmanager
def _as_errors(final: Path, sources: Set[Path]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise UnwritableTarget(f"no room left in `{final.parent}`: {error.strerror}") from error
        if error.filename is not None and Path(error.filename) in sources:
            raise open_error(Path(error.filename), error) from error
        raise UnwritableTarget(f"cannot write `{error.filename or final}`: {error.strerror}") from error


def _refuse_overlap(final: Path, source: Path, files: Set[Path]) -> None:
    """Neither may lie in the other: a source stays as it is."""
    target = final.parent.resolve() / final.name
    folder = source.resolve()
    real = {folder, *(file.resolve() for file in files)}
    if target in real or folder in target.parents or any(target in path.parents for path in real):
        raise UnwritableTarget(
            f"`{final}` and the source `{source}` lie in one another", hint="choose a destination beside the source"
        )


def _reserve(plan: Plan, partial: Path) -> None:
    """Every file at its final size, with the bytes that are known before any tensor."""
    reservation = plan.reservation
    literals: dict[Path, list[tuple[int, bytes]]] = {path: [] for path in reservation.sizes}
    for path, at, content in reservation.literals:
        literals[path].append((at, content))
    for path, size in reservation.sizes.items():
        here = _here(path, reservation.path, partial)
        here.parent.mkdir(parents=True, exist_ok=True)
        with here.open("wb") as file:
            os.truncate(file.fileno(), size)
            for at, content in literals[path]:
                write_at(file.fileno(), content, at)


def _here(path: Path, final: Path, partial: Path) -> Path:
    return partial / path.relative_to(final)


def _fill(plan: Plan, files: Files, meter: Meter) -> None:
    """Run every copy. The threads draw from one queue, so that its length costs no memory."""
    final, partial = plan.reservation.path, partial_path(plan.reservation.path)
    copies = ((move.item, copy) for move in plan.moves for copy in move.copies)
    drawing, stop = threading.Lock(), threading.Event()

    def work() -> None:
        while not stop.is_set():
            with drawing:
                drawn = next(copies, None)
            if drawn is None:
                return
            item, copy = drawn
            target = copy.target._replace(path=_here(copy.target.path, final, partial))
            try:
                for done in copy_view(files, copy.source, target):
                    meter.add(done)
                    if stop.is_set():
                        return
            except OverflowError as error:
                stop.set()
                raise ConvertError(f"`{item}` has {error}", hint=BEYOND_HINT) from error
            except BaseException:
                stop.set()  # the others need not go on
                raise

    with ThreadPoolExecutor(WORKERS) as pool:
        try:
            for worker in [pool.submit(work) for _ in range(WORKERS)]:
                worker.result()
        finally:
            stop.set()


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
        exact, rounded = files.array(check.view), files.array(check.other)
        blocks = blocks_of(check.view.shape, check.view.itemsize)
        failed = any(bool((round_to(exact[block], check.other.dtype) != rounded[block]).any()) for block in blocks)
    elif check.other is not None:
        failed = next(differing(files, check.view, check.other), None) is not None
    else:
        array = files.array(check.view)
        failed = any(bool(array[block].any()) for block in blocks_of(check.view.shape, check.view.itemsize))
    if failed:
        raise ConvertError(check.failure, hint=check.hint)


def _finish(plan: Plan, partial: Path, further: Mapping[Path, bytes]) -> None:
    """The small files, in their order, then everything to the disk."""
    reservation = plan.reservation
    texts = {**reservation.texts, **further}
    for target, source in reservation.carried.items():
        if target not in texts:
            here = _here(target, reservation.path, partial)
            here.parent.mkdir(parents=True, exist_ok=True)
            copy_file(source, here)
    for path, content in texts.items():
        here = _here(path, reservation.path, partial)
        here.parent.mkdir(parents=True, exist_ok=True)
        write_new(here, content)
    for file in (*sorted(partial.rglob("*")), partial):
        sync(file)
