"""Contents of the Hub: the files of a commit, compared with those of a directory, before it is made and afterwards."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_convert.errors import HubError
from mcore_convert.storage.sources import open_file

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, HfApi


def files_at(api: HfApi, repo: str, revision: str) -> dict[str, Any]:
    """Return the files of a commit by their names."""
    entries = api.list_repo_tree(repo, recursive=True, revision=revision)
    return {entry.path: entry for entry in entries if hasattr(entry, "blob_id")}


def is_same(path: Path, there: Any) -> bool:
    """Return whether a file equals the Hub's: by the SHA-256 of a large file, by the git object id of a small one."""
    size = path.stat().st_size
    if size != there.size:
        return False
    with open_file(path) as file:
        if there.lfs is not None:
            return hashlib.file_digest(file, "sha256").hexdigest() == str(there.lfs.sha256)
        return hashlib.sha1(b"blob %d\0" % size + file.read()).hexdigest() == str(there.blob_id)


def check_arrived(
    api: HfApi,
    repo: str,
    commit: str,
    additions: Iterable[CommitOperationAdd],
    kept: Mapping[str, int],
    removed: Iterable[str],
) -> None:
    """Prove that a commit has the files that were sent, by reading it as anyone who loads the model does.

    Args:
        kept: files that were on the Hub already.

    Raises:
        HubError: it lacks some.
    """
    there = files_at(api, repo, commit)
    sent = {each.path_in_repo: each for each in additions}
    problems = [f"{name}: still there" for name in removed if name in there]
    problems += [f"{name}: not there" for name in (*sent, *kept) if name not in there]
    for name, addition in sent.items():
        if name in there and not _has_arrived(addition, there[name]):
            problems.append(f"{name}: {there[name].size:,} bytes, which are not those that were sent")
    if problems:
        raise HubError(
            f"`{repo}` has not taken what was sent: its commit {commit[:8]} is no whole model",
            items=problems,
            hint="nobody should load it: run the same command again",
        )


def _has_arrived(addition: CommitOperationAdd, there: Any) -> bool:
    """Return whether the Hub has a sent file; a large one is not read again, but compared by the client's checksum."""
    if there.lfs is not None and there.size == addition.upload_info.size:
        return bool(addition.upload_info.sha256.hex() == there.lfs.sha256)
    return is_same(Path(str(addition.path_or_fileobj)), there)
