"""A checkpoint against its own manifest: every file is read again, and differences are reported by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mcore_convert.checkpoints.manifest import MANIFEST, UNCOVERED, Manifest, Part, read_manifest, sizes_that_differ
from mcore_convert.checkpoints.runs import CHECKPOINTS
from mcore_convert.errors import UnreadableCheckpoint
from mcore_convert.formats.megatron.run_directory import TRACKER, iterations, parse_tracker
from mcore_convert.formats.registry import directory_of
from mcore_convert.storage.digests import checksum_of_runs, gaps_between
from mcore_convert.storage.elements import Files
from mcore_convert.storage.paths import absent, files_in
from mcore_convert.storage.phases import phase
from mcore_convert.storage.progress import Meter, Progress
from mcore_convert.storage.threads import in_threads


@dataclass(frozen=True)
class Damage:
    """Bytes `start` to `end` of a file that differ from those that were written.

    `tensor` is the tensor stored there, with the number of the block in its part of the file and the number of blocks.
    It is None for the checksum of all bytes outside of tensors: a header, or a whole small file.
    """

    file: str
    start: int
    end: int
    tensor: str | None = None
    block: int = 0
    num_blocks: int = 0

    def __str__(self) -> str:
        if self.tensor is not None:
            block = f"block {self.block} of {self.num_blocks}, bytes {self.start:,} to {self.end:,}"
            return f"{self.file}: {self.tensor}, {block}"
        return (
            f"{self.file}: what is in none of its tensors" if self.num_blocks else f"{self.file}: not what was written"
        )


@dataclass(frozen=True)
class Integrity:
    """Result of a check of a directory against its manifest. Sizes in bytes.

    `absent` are files that are missing or have another size, one line each; `unlisted` are files that the manifest
    does not list, which is no fault. Where `has_checksums` is false, only sizes could be compared.
    """

    path: Path
    version: str
    num_files: int
    num_tensors: int
    nbytes: int
    has_checksums: bool
    absent: tuple[str, ...]
    damages: tuple[Damage, ...]
    unlisted: tuple[str, ...]

    @property
    def intact(self) -> bool:
        """Whether every file that was written is present, with the bytes that were written."""
        return not self.absent and not self.damages


def check_integrity(path: Path, progress: Progress | None = None) -> Integrity:
    """Compare every byte of a directory with its manifest.

    Args:
        path: the directory, a file in it, or the directory of a run, for its newest checkpoint.

    Raises:
        UnreadableCheckpoint: it has no manifest, or the manifest is damaged.
        OSError: a file cannot be read.
    """
    manifest = manifest_of(path)
    folder = manifest.folder
    absent = tuple(sizes_that_differ(manifest, manifest.files))
    there = {line.split(": ")[0] for line in absent}
    whole = {name: file for name, file in manifest.files.items() if name not in there}
    nbytes = sum(file.size for file in whole.values()) if manifest.has_checksums else 0
    damages: list[Damage] = []
    if manifest.has_checksums:
        meter = Meter(nbytes, progress)
        with phase(progress, "reading", nbytes), Files() as files:
            in_threads(lambda job: list(_damages(manifest, job, files, meter)), _jobs(manifest, whole), damages.extend)
    known = {*manifest.files, *UNCOVERED}
    unlisted = tuple(name for name in files_in(folder) if name not in known and not Path(name).name.startswith("."))
    return Integrity(
        folder,
        manifest.version,
        len(manifest.files),
        manifest.num_tensors,
        nbytes,
        manifest.has_checksums,
        absent,
        tuple(sorted(damages, key=lambda each: (each.file, each.start))),
        unlisted,
    )


def manifest_of(path: Path) -> Manifest:
    """Return the manifest of a checkpoint, which itself need not be readable.

    Raises:
        UnreadableCheckpoint: there is none, or it is damaged.
    """
    if not path.exists():
        raise absent(path)
    for folder in _folders(directory_of(path)):
        manifest = read_manifest(folder / MANIFEST)
        if manifest is not None:
            return manifest
    raise UnreadableCheckpoint(
        f"`{path}` has no `{MANIFEST}` to be checked against",
        hint="what mcore-convert writes has one; to compare two checkpoints, name both",
    )


def _folders(path: Path) -> Iterator[Path]:
    """Yield the directories that may hold the manifest: the checkpoint, the one that a tracker names, the only one."""
    yield path
    for run in (path, path / CHECKPOINTS):
        tracker = run / TRACKER
        if tracker.is_file():
            yield run / parse_tracker(tracker)
        yield from iterations(run)[-1:]


# One thread's unit of work: some blocks of a part of a file, or None for all bytes outside of tensors.
_Job = tuple[str, Part | None, range]
_BLOCKS = 8


def _jobs(manifest: Manifest, names: Iterable[str]) -> Iterator[_Job]:
    regions: dict[str, dict[int, Part]] = {name: {} for name in names}
    for part in manifest.parts:
        if part.file in regions and part.sums:
            regions[part.file].setdefault(part.start, part)  # several tensors at one place have one checksum
    for name, parts in regions.items():
        yield name, None, range(0)
        for part in parts.values():
            for first in range(0, len(part.sums), _BLOCKS):
                yield name, part, range(first, min(first + _BLOCKS, len(part.sums)))


def _damages(manifest: Manifest, job: _Job, files: Files, meter: Meter) -> Iterator[Damage]:
    name, part, blocks = job
    path = manifest.folder / name
    fd = files.fd(path)
    if part is None:
        size = manifest.files[name].size
        runs = manifest.runs.get(name, ())
        gaps = [*gaps_between(runs, size)]
        if checksum_of_runs(fd, path, gaps) != manifest.files[name].rest:
            yield Damage(name, gaps[0][0] if gaps else 0, gaps[-1][1] if gaps else 0, num_blocks=len(runs))
        meter.add(sum(end - start for start, end in gaps))
        return
    for number in blocks:
        start = part.start + number * manifest.block
        end = min(start + manifest.block, part.end)
        if checksum_of_runs(fd, path, [(start, end)]) != part.sums[number]:
            yield Damage(name, start, end, part.tensor, number + 1, len(part.sums))
        meter.add(end - start)
