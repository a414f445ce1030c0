"""Running a plan: reserve the files, fill them from several threads, rename at the end.

Runs of bytes pass through memory in steps that stay in the cache, where their checksums are taken; without checksums
the kernel copies them. What is transposed or cut across rows goes through memory a block at a time.
"""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Callable, Iterator, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mcore_convert.checkpoints.checks import prove
from mcore_convert.conversion.beside import copy_together
from mcore_convert.conversion.plan import Plan
from mcore_convert.conversion.recording import Recording
from mcore_convert.conversion.reopening import check_reopened
from mcore_convert.errors import MAX_ITEMS, ConvertError, UnreadableCheckpoint, UnwritableTarget, counted
from mcore_convert.storage.destination import check_free, claimed, partial_path
from mcore_convert.storage.disk import copy_file, reserve, stamped, sync, write_new
from mcore_convert.storage.elements import WORKERS, Files
from mcore_convert.storage.paths import moved
from mcore_convert.storage.phases import phase
from mcore_convert.storage.progress import Meter, Progress
from mcore_convert.storage.sources import Stamp
from mcore_convert.storage.views import open_error

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
    strict: bool = False,
    checksums: bool = True,
) -> tuple[str, ...]:
    """Write what a plan says, with its manifest, and return what a user should know of the values.

    The destination appears at the end, whole, or not at all.

    Args:
        overwrite: replace a destination that exists; it stays until the new one is complete.
        progress: called with the bytes copied so far and their total, by one thread at a time.
        conclude: called with the partial directory when all tensors are in it; returns further small files, by the
            paths that they will have. What it raises leaves nothing behind.
        strict: refuse NaN and infinities.
        checksums: put them into the manifest. Without them values are not looked at, and the kernel copies.

    Raises:
        ConvertError: with `strict`, numbers that are none; a number that a cast would make infinite.
        UnwritableTarget: the destination exists, is being written by another process, or there is no room.
        UnreadableCheckpoint: a check on the source's data failed, or its files changed.
    """
    final = plan.reservation.path
    check_free(final, overwrite=overwrite)
    sources = plan.source_files | {*plan.reservation.carried.values()}
    for place in (final, partial_path(final)):
        _refuse_overlap(place, plan.source.path, sources)
    stamps = {**stamped(sources), **plan.stamps}
    with phase(progress, "checking"):
        prove(plan.checks)
        _check_unchanged(stamps)
    partial = partial_path(final)
    with _as_errors(final, sources), claimed(final, plan.reservation.nbytes, overwrite=overwrite) as claim:
        with phase(progress, "copying", plan.nbytes), Files() as files:
            _reserve(plan, partial)
            recording = Recording(plan, partial, checksums=checksums)
            _fill(plan, files, Meter(plan.nbytes, progress), recording)
        notes = _not_finite(recording, strict=strict)
        further = conclude(partial) if conclude else {}
        with phase(progress, "finishing"):
            _finish(plan, partial, further, recording)
            check_reopened(plan, partial)
            _check_unchanged(stamps)
            claim.publish()
    return notes


def _not_finite(recording: Recording, *, strict: bool) -> tuple[str, ...]:
    """A note of the tensors that hold NaN or infinities, all in one.

    Raises:
        ConvertError: with `strict`, in the place of the note.
    """
    lines = recording.not_finite()
    if not lines:
        return ()
    message = counted(len(lines), "tensor holds", "tensors hold") + " numbers that are not finite"
    if strict:
        raise ConvertError(message, items=lines, hint="leave out --strict to copy them as they are")
    more = [f"and {len(lines) - MAX_ITEMS} more"] if len(lines) > MAX_ITEMS else []
    return (f"{message}: {'; '.join([*lines[:MAX_ITEMS], *more])}",)


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


def _check_unchanged(stamps: Mapping[Path, Stamp]) -> None:
    """Prove that the files of the source are still those that were planned with."""
    now = stamped(stamps)
    changed = [str(path) for path, stamp in stamps.items() if now[path] != stamp]
    if changed:
        raise UnreadableCheckpoint(
            "the source has changed since it was opened",
            items=changed,
            hint="is another process writing it? wait for it, and run this again",
        )


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
        here = moved(path, reservation.path, partial)
        here.parent.mkdir(parents=True, exist_ok=True)
        reserve(here, size, literals[path])


def _fill(plan: Plan, files: Files, meter: Meter, recording: Recording) -> None:
    """Run every copy. The threads draw from one queue, so that its length costs no memory."""
    copies = ((move.item, groups) for move in plan.moves for groups in recording.in_order(move.copies))
    drawing, stop = threading.Lock(), threading.Event()
    feed = recording.feed if recording.checksums else None

    def work() -> None:
        while not stop.is_set():
            with drawing:
                drawn = next(copies, None)
            if drawn is None:
                return
            item, groups = drawn
            try:
                for group in groups:
                    here = [copy._replace(target=copy.target.moved(recording.here)) for copy in group]
                    for done in copy_together(files, here, feed):
                        meter.add(done)
                        if stop.is_set():
                            return
                    recording.done(here, files)
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
    recording.complete(files)


def _finish(plan: Plan, partial: Path, further: Mapping[Path, bytes], recording: Recording) -> None:
    """The small files, in their order, and the manifest of all, then everything to the disk."""
    reservation = plan.reservation
    texts = {**reservation.texts, **further}
    for target, source in reservation.carried.items():
        if target not in texts:
            here = moved(target, reservation.path, partial)
            here.parent.mkdir(parents=True, exist_ok=True)
            copy_file(source, here)
    for path, content in texts.items():
        here = moved(path, reservation.path, partial)
        here.parent.mkdir(parents=True, exist_ok=True)
        write_new(here, content)
    recording.write_manifest()
    for file in (*sorted(partial.rglob("*")), partial):
        sync(file)
