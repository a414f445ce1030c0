"""The journal of a conversion: the files of its partial directory that are complete and on the disk.

A later run continues from it if this one ends early. Processes that share a conversion keep one journal each, and the
first of them reads all of them for the manifest.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from mcore_convert.conversion.plan import Copy, Plan
from mcore_convert.spec.family import Item
from mcore_convert.storage.disk import append, remove_tree, sync
from mcore_convert.storage.marker import JOURNAL, is_bookkeeping, journals
from mcore_convert.storage.paths import name_below
from mcore_convert.storage.sources import open_file
from mcore_convert.version import VERSION


class Kept(NamedTuple):
    """Complete file: its size and time once on the disk, and the facts of its regions."""

    size: int
    written: int
    regions: tuple[tuple[Any, ...], ...]


class Journal:
    """Journal of one process in a partial directory, for one plan.

    Args:
        partial: the directory, which need not exist yet.
        identity: `fingerprint` of the plan; files written for another plan are not reused.
        stays: whether the directory is left in place if this run ends early.
        rank: rank of the process.
    """

    def __init__(self, partial: Path, identity: str, *, stays: bool, rank: int = 0) -> None:
        self._partial, self._identity, self.stays = partial, identity, stays
        self._file = partial / f"{JOURNAL}-{rank}"
        self._lock = threading.Lock()

    def work(self, plan: Plan, mine: Set[Path], stop: threading.Event) -> Iterator[tuple[Item, Sequence[Copy]]]:
        """Yield the copies of each weight into the files `mine`, in the order of the plan."""
        for move in plan.moves:
            yield move.item, [copy for copy in move.copies if copy.target.path in mine]

    def add(self, path: Path, regions: Sequence[Sequence[Any]]) -> None:
        """Note that a file is complete, once it is on the disk."""
        sync(path)
        state = path.stat()
        entry = {
            "plan": self._identity,
            "file": str(path.relative_to(self._partial)),
            "size": state.st_size,
            "written": state.st_mtime_ns,
            "regions": regions,
        }
        line = b"\n" + json.dumps(entry).encode()  # a killed run may have left a partial last line
        with self._lock:
            append(self._file, line)

    def kept(self) -> dict[Path, Kept]:
        """Return the files that this and other processes have completed for the plan, if unchanged since."""
        kept: dict[Path, Kept] = {}
        for journal in journals(self._partial):
            for entry in _entries(journal):
                with contextlib.suppress(KeyError, TypeError):  # not an entry of this format
                    if entry["plan"] == self._identity:
                        path = self._partial / entry["file"]
                        kept[path] = Kept(entry["size"], entry["written"], tuple(map(tuple, entry["regions"])))
        return {path: each for path, each in kept.items() if _stands(path, each)}


def clear_except(partial: Path, kept: Mapping[Path, Kept]) -> bool:
    """Remove everything in a partial directory except its marker, its journals and the kept files.

    Where no file is kept the journals are removed as well; return whether there were some.
    """
    stale = [] if kept else journals(partial)
    for journal in stale:
        journal.unlink()
    for path in sorted(partial.rglob("*"), reverse=True):
        if path in kept or (path.parent == partial and is_bookkeeping(path.name)):
            continue
        if path.is_dir() and not path.is_symlink():
            with contextlib.suppress(OSError):  # a directory with kept files
                path.rmdir()
        else:
            remove_tree(path)
    return bool(stale)


def fingerprint(plan: Plan, *, checksums: bool) -> str:
    """Return the fingerprint of a plan: version, options, state of the source, and layout of the target."""
    root = plan.reservation.path
    digest = xxhash.xxh3_128()
    stamps = {path: plan.stamps[path][:2] for path in sorted(plan.source_files) if path in plan.stamps}
    facts = [
        VERSION,
        dict(plan.options),
        checksums,
        [(str(path.resolve()), *stamp) for path, stamp in stamps.items()],
        [(str(path.relative_to(root)), size) for path, size in sorted(plan.reservation.sizes.items())],
    ]
    digest.update(json.dumps(facts, default=str).encode())
    for path, at, content in plan.reservation.literals:
        digest.update(f"{name_below(path, root)} {at} ".encode())
        digest.update(content)
    return digest.hexdigest()


def _entries(journal: Path) -> Iterator[dict[str, Any]]:
    """Yield the entries of a journal; the last line of a killed run may be torn."""
    with open_file(journal) as file:
        for line in file:
            with contextlib.suppress(ValueError, RecursionError):
                entry = json.loads(line)
                if isinstance(entry, dict):
                    yield entry


def _stands(path: Path, kept: Kept) -> bool:
    try:
        state = path.stat(follow_symlinks=False)
    except OSError:
        return False
    return (state.st_size, state.st_mtime_ns) == (kept.size, kept.written)
