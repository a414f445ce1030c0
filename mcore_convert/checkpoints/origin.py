"""The origin of an output, for its manifest: a name that is independent of the machine, and a fingerprint."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mcore_convert.checkpoints.manifest import MANIFEST, checksum_of
from mcore_convert.formats.base import Checkpoint
from mcore_convert.formats.megatron.run_directory import RELEASE, iteration_of
from mcore_convert.storage.digests import checksum_of_runs
from mcore_convert.storage.remote import RemotePath
from mcore_convert.storage.sources import close_fd, open_fd, size_of

ENDS = 64 * 2**10  # bytes at either end of a file that distinguish it from others of its size


def source_facts(checkpoint: Checkpoint, files: Iterable[Path]) -> dict[str, Any]:
    """Return the name and the format of a source, and the size of each copied file with a checksum of its ends.

    Where the source has a manifest itself, its checksum stands for all files.
    """
    root = checkpoint.path
    facts: dict[str, Any] = {"name": name_of(root), "format": checkpoint.format}
    checksum = checksum_of(root / MANIFEST) if root.is_dir() else None
    if checksum is not None:
        facts["manifest"] = checksum
    named = {str(path.relative_to(root)) if path.is_relative_to(root) else path.name: path for path in files}
    facts["files"] = {name: _ends_of(named[name]) for name in sorted(named)}
    return facts


def name_of(path: Path) -> str:
    """Return the name of a checkpoint without its path: an iteration with its run, the Hub's model with its commit."""
    if isinstance(path, RemotePath) and path.parent is path:  # a repository of the Hub, whose path includes the commit
        return "/".join(path.parts[1:])
    full = path.absolute()
    name, above = full.name, full.parent.name
    if above == "snapshots" and full.parent.parent.name.startswith("models--"):
        return "/".join(full.parent.parent.name.split("--")[1:]) + f"@{name}"
    return f"{above}/{name}" if name == RELEASE or iteration_of(full) is not None else name


def _ends_of(path: Path) -> dict[str, Any]:
    fd = open_fd(path)
    try:
        size = size_of(fd)
        runs = [(0, size)] if size <= 2 * ENDS else [(0, ENDS), (size - ENDS, size)]
        return {"size": size, "ends": checksum_of_runs(fd, path, runs)}
    finally:
        close_fd(fd)
