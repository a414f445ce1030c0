"""Execution of a plan: reserve the files, fill them from several threads, rename at the end.

Runs of bytes pass through memory in steps that stay in the cache, where their checksums are computed; without checksums
the kernel copies them. Transposed views, and views cut across rows, go through memory a block at a time.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator, Mapping, Set
from pathlib import Path

from mcore_convert.checkpoints.checks import prove
from mcore_convert.conversion.copying import fill
from mcore_convert.conversion.journal import Journal, clear_except, fingerprint
from mcore_convert.conversion.plan import Plan
from mcore_convert.conversion.ranks import Ranks, current
from mcore_convert.conversion.recording import Recording
from mcore_convert.conversion.reopening import check_reopened
from mcore_convert.conversion.sent_files import ON_DISK, SentFiles
from mcore_convert.errors import MAX_ITEMS, ConvertError, UnreadableCheckpoint, UnwritableTarget, counted
from mcore_convert.storage.asking import StoreError
from mcore_convert.storage.destination import check_free, claimed, partial_path
from mcore_convert.storage.disk import copy_file, remove_tree, reserve, stamped, sync, write_new
from mcore_convert.storage.elements import Files
from mcore_convert.storage.paths import moved
from mcore_convert.storage.phases import phase
from mcore_convert.storage.progress import Meter, Progress
from mcore_convert.storage.remote import RemotePath
from mcore_convert.storage.sending import sending, staged, staging
from mcore_convert.storage.sources import Stamp
from mcore_convert.storage.views import bytes_of, open_error

# Two threads and their blocks need next to nothing: anonymous memory is the interpreter and the plan itself.
BASE_MEMORY = 64 * 2**20
REMOTE_MEMORY = 768 * 2**20  # fetched ranges, pending requests, and parts to send

CLEARED = "an earlier run had completed files here, which were cleared: --resume would have gone on with them"
OTHER_WORK = "what an earlier run had completed here was of another source, other options or another version: cleared"


def expected_memory(plan: Plan) -> int:
    """Return an upper estimate of anonymous memory in bytes: the interpreter, 1 kB or so per copy, and fetched data."""
    remote = any(isinstance(path, RemotePath) for path in (plan.source.path, plan.reservation.path))
    return BASE_MEMORY + remote * REMOTE_MEMORY + 1024 * sum(len(move.copies) for move in plan.moves)


def execute(
    plan: Plan,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
    conclude: Callable[[Path], Mapping[Path, bytes]] | None = None,
    strict: bool = False,
    checksums: bool = True,
    resume: bool = False,
    workers: int | None = None,
) -> tuple[str, ...]:
    """Execute a plan, write its manifest, and return notes to the user about the values.

    The destination appears at the end, complete, or not at all. Processes that have `joined` write it together: each
    fills files of its own, and the first one does the rest.

    Args:
        overwrite: replace a destination that exists; it stays until the new one is complete.
        progress: called with the bytes copied so far and their total, by one thread at a time.
        conclude: called with the partial directory when all tensors are in it; returns further small files, by their
            final paths. An exception from it leaves nothing behind.
        strict: refuse NaN and infinities.
        checksums: put them into the manifest. Without them values are not examined, and the kernel copies.
        resume: continue from the files of an earlier run of the same plan; keep those of this run if it ends early.
        workers: threads that copy; WORKERS unless given.

    Raises:
        ConvertError: with `strict`, NaN or infinities; a number that a cast would make infinite.
        UnwritableTarget: the destination exists, is being written by another process, or lacks room.
        UnreadableCheckpoint: a check on the source's data failed, or its files changed.
    """
    final, ranks = plan.reservation.path, current()
    check_free(final, overwrite=overwrite)
    _check_sharing(final, resume=resume, ranks=ranks)
    sources = plan.source_files | {*plan.reservation.carried.values()}
    for place in (final, partial_path(final)):
        _refuse_overlap(place, plan.source.path, sources)
    stamps = {**stamped(sources), **plan.stamps}
    with phase(progress, "checking"):
        prove(plan.checks[ranks.rank :: ranks.size])
        check_unchanged(stamps)
    ranks.meet("proven")
    partial, resume = partial_path(staged(final)), resume or ranks.size > 1
    journal = Journal(partial, fingerprint(plan, checksums=checksums), stays=resume, rank=ranks.rank)
    run = _Run(plan, ranks, progress, journal, checksums, workers)
    if not ranks.is_first:
        with _as_errors(final, sources):
            run.help()
        return ()
    with (
        _as_errors(final, sources),
        staging(final) as place,
        claimed(place, _room(plan), overwrite=overwrite and place == final, resume=resume) as claim,
        sending(final, overwrite=overwrite) if isinstance(final, RemotePath) else contextlib.nullcontext() as remote,
    ):
        sent = SentFiles(partial, remote) if remote is not None else None
        recording, notes = run.lead(sent)
        notes += [CLEARED] if claim.cleared else []
        notes += _not_finite(recording, strict=strict)
        further = conclude(partial if remote is None else remote.complete()) if conclude else {}
        with phase(progress, "finishing"):
            small = _finish(plan, partial, further, recording)
            if remote is None or sent is None:
                for file in (*sorted(partial.rglob("*")), partial):
                    sync(file)
                check_reopened(plan, partial)
                check_unchanged(stamps)
                claim.publish()
            else:
                for file in small:
                    sent.send(file)
                check_reopened(plan, remote.complete())
                check_unchanged(stamps)
                remote.publish()
                remove_tree(partial)
    ranks.send("end", None)
    return tuple(notes)


class _Run:
    """Copying of one plan by this process."""

    def __init__(
        self,
        plan: Plan,
        ranks: Ranks,
        progress: Progress | None,
        journal: Journal,
        checksums: bool,
        workers: int | None,
    ) -> None:
        self._plan, self._ranks, self._progress, self._journal = plan, ranks, progress, journal
        self._partial = partial_path(staged(plan.reservation.path))
        self._checksums, self._workers = checksums, workers

    def lead(self, sent: SentFiles | None) -> tuple[Recording, list[str]]:
        """Reserve the files, fill those of this process, and wait for the others; return the joint record and notes.

        Args:
            sent: destination of complete files, in place of the journal.
        """
        root, sizes = self._plan.reservation.path, self._plan.reservation.sizes
        kept = self._journal.kept()
        removed = clear_except(self._partial, kept)
        _reserve(self._plan, self._partial, {*kept})
        self._ranks.send("kept", sorted(str(path.relative_to(self._partial)) for path in kept))
        recording = self._copy({moved(path, self._partial, root) for path in kept}, sent)
        self._ranks.meet("copied")
        done = self._journal.kept() if self._ranks.size > 1 else kept
        for path, each in done.items():
            if path not in recording.filled:
                recording.adopt(path, each.regions)
        if not kept:
            return recording, [OTHER_WORK] if removed else []
        return recording, [f"{len(kept)} of {len(sizes)} files were complete already"]

    def help(self) -> None:
        """Fill the files of this process once they are reserved, and wait for the end."""
        root = self._plan.reservation.path
        self._copy({root / name for name in self._ranks.receive("kept")})
        self._ranks.meet("copied")
        self._ranks.receive("end")

    def _copy(self, kept: Set[Path], sent: SentFiles | None = None) -> Recording:
        """Fill the files of this process that are not yet complete."""
        plan, ranks = self._plan, self._ranks
        sizes = {path: size for path, size in plan.reservation.sizes.items() if path not in kept}
        mine = ranks.part(sizes)
        there = bytes_of(c.source for move in plan.moves for c in move.copies if c.target.path in kept)
        meter = Meter(plan.nbytes, self._progress, there)
        with phase(self._progress, "copying", plan.nbytes), Files() as files, ranks.counting(meter):
            recording = Recording(plan, self._partial, mine, checksums=self._checksums)
            if sent is not None:
                sent.note = recording.note
            fill(plan, mine, files, meter, recording, sent or self._journal, self._workers)
        return recording


def _not_finite(recording: Recording, *, strict: bool) -> list[str]:
    """Return one note of all tensors that hold NaN or infinities.

    Raises:
        ConvertError: with `strict`, in place of the note.
    """
    lines = recording.not_finite()
    if not lines:
        return []
    message = counted(len(lines), "tensor holds", "tensors hold") + " numbers that are not finite"
    if strict:
        raise ConvertError(message, items=lines, hint="leave out --strict to copy them as they are")
    more = [f"and {len(lines) - MAX_ITEMS} more"] if len(lines) > MAX_ITEMS else []
    return [f"{message}: {'; '.join([*lines[:MAX_ITEMS], *more])}"]


@contextlib.contextmanager
def _as_errors(final: Path, sources: Set[Path]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        hint = getattr(error, "hint", None)
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            place = final if isinstance(error, StoreError) else staged(final).parent
            raise UnwritableTarget(f"no room left in `{place}`: {error.strerror}", hint=hint) from error
        if error.filename is not None and str(error.filename) in map(str, sources):
            raise open_error(str(error.filename), error) from error
        raise UnwritableTarget(f"cannot write `{error.filename or final}`: {error.strerror}", hint=hint) from error


def check_unchanged(stamps: Mapping[Path, Stamp]) -> None:
    """Prove that the files of a source have not changed since they were opened.

    Raises:
        UnreadableCheckpoint: one of them has changed.
    """
    now = stamped(stamps)
    changed = [str(path) for path, stamp in stamps.items() if now[path] != stamp]
    if changed:
        raise UnreadableCheckpoint(
            "the source has changed since it was opened",
            items=changed,
            hint="is another process writing it? wait for it, and run this again",
        )


def _refuse_overlap(final: Path, source: Path, files: Set[Path]) -> None:
    """Refuse a destination within the source, or a source within the destination: a source stays as it is."""
    target = final.parent.resolve() / final.name
    folder = source.resolve()
    real = {folder, *(file.resolve() for file in files)}
    if target in real or folder in target.parents or any(target in path.parents for path in real):
        raise UnwritableTarget(
            f"`{final}` and the source `{source}` lie in one another", hint="choose a destination beside the source"
        )


def _reserve(plan: Plan, partial: Path, kept: Set[Path]) -> None:
    """Create every file that is not kept at its final size, with the bytes that are known before any tensor."""
    reservation = plan.reservation
    literals: dict[Path, list[tuple[int, bytes]]] = {path: [] for path in reservation.sizes}
    for path, at, content in reservation.literals:
        literals[path].append((at, content))
    for path, size in reservation.sizes.items():
        here = moved(path, reservation.path, partial)
        if here not in kept:
            here.parent.mkdir(parents=True, exist_ok=True)
            reserve(here, size, literals[path])


def _finish(plan: Plan, partial: Path, further: Mapping[Path, bytes], recording: Recording) -> list[Path]:
    """Write the small files and the manifest of all; return them in the order in which they complete a checkpoint."""
    reservation = plan.reservation
    texts = {**reservation.texts, **further}
    written = []
    for target, source in reservation.carried.items():
        if target not in texts:
            here = moved(target, reservation.path, partial)
            here.parent.mkdir(parents=True, exist_ok=True)
            copy_file(source, here)
            written.append(here)
    for path, content in texts.items():
        here = moved(path, reservation.path, partial)
        here.parent.mkdir(parents=True, exist_ok=True)
        write_new(here, content)
        written.append(here)
    return [*sorted(written, key=lambda path: -len(path.parts)), recording.write_manifest()]


def _room(plan: Plan) -> int:
    """Return the bytes that must be free on this machine."""
    reservation = plan.reservation
    if not isinstance(reservation.path, RemotePath):
        return reservation.nbytes
    return sum(sorted(reservation.sizes.values())[-ON_DISK:]) + sum(map(len, reservation.texts.values()))


def _check_sharing(final: Path, *, resume: bool, ranks: Ranks) -> None:
    """Refuse a journal, and several processes, without a file system."""
    if isinstance(final, RemotePath) and (resume or ranks.size > 1):
        what = "is written by one process" if ranks.size > 1 else "cannot be gone on with"
        raise UnwritableTarget(
            f"`{final}` is in a remote store, and {what}",
            hint="convert to a directory that all processes see, and copy it to the store",
        )
