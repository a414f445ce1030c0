"""Upload of a model's directory to the Hub: one commit with the missing files, on a branch, with a tag if wanted.

The commit is made by the client's `create_commit`: files are sent first, by Xet or git LFS, and the commit then names
all of them at once, so that nobody ever loads half a model. `upload_folder` may split a folder over several commits.
Both reuse the files that an interrupted call has sent.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_convert.checkpoints.hub_errors import LOGIN, hub_errors, is_passing
from mcore_convert.checkpoints.manifest import MANIFEST
from mcore_convert.errors import HubError, UnreadableCheckpoint
from mcore_convert.formats.files.model_folder import CONFIG, GENERATION_CONFIG, TOKENIZER_FILES
from mcore_convert.publishing.arrival import check_arrived, files_at, is_same
from mcore_convert.storage.paths import files_in
from mcore_convert.storage.phases import phase
from mcore_convert.storage.progress import Progress
from mcore_convert.version import VERSION

if TYPE_CHECKING:
    from huggingface_hub import HfApi

MAIN = "main"
WAITS = (1.0, 4.0)  # seconds before a commit is retried; the client itself retries each transfer five times
# Weight files that transformers recognises: those of an earlier model would be loaded in place of the new ones.
WEIGHTS = re.compile(r"(pytorch_)?model(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?")


@dataclass(frozen=True)
class Destination:
    """Destination on the Hub. `private` applies to a new repository; `message` is that of the commit.

    `checked`: the repository includes its owner's name, and the token may write (see `checked`).
    """

    repo: str
    private: bool = False
    branch: str = MAIN
    tag: str | None = None
    message: str | None = None
    checked: bool = False


@dataclass(frozen=True)
class Upload:
    """Result of an upload, or of its plan (`dry_run`): files by name with their size in bytes.

    `sent` were missing or different; `kept` are there already; `removed` are files of another model that would be
    loaded in place of this one's. `commit` is None if nothing had to change.
    """

    repo: str
    url: str
    branch: str
    tag: str | None
    created: bool
    sent: Mapping[str, int]
    kept: Mapping[str, int]
    removed: tuple[str, ...]
    commit: str | None
    dry_run: bool

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {**vars(self), "sent": dict(self.sent), "kept": dict(self.kept), "removed": list(self.removed)}


def upload(
    folder: Path,
    destination: Destination,
    *,
    dry_run: bool = False,
    progress: Progress | None = None,
    bars: bool = False,
) -> Upload:
    """Send a directory to the Hub. Files that are there already are not sent again; without changes there is no commit.

    Args:
        dry_run: ask the Hub, and report what would be done.
        progress: gets the names of the phases.
        bars: show the client's progress bars instead while it sends.

    Raises:
        HubError: the Hub refuses, or cannot be reached.
    """
    with phase(progress, "asking the Hub"):
        destination = checked(destination, writable=not dry_run)
    repo = destination.repo
    with hub_errors(f"`{repo}` cannot be written"), _bars(bars):
        api = _api()
        with phase(progress, "asking the Hub"):
            there = _refs(api, repo)
            if there is None and not dry_run:
                api.create_repo(repo, private=destination.private or None, exist_ok=True)
            head = (there or {}).get(("branch", destination.branch))
            tagged = (there or {}).get(("tag", destination.tag or ""))
            _check_tag(repo, destination.tag, tagged, moves=tagged != head)
            if there is not None and destination.private:
                _check_private(api, repo)
            if head is None and not dry_run:
                head = _make_branch(api, repo, destination.branch)
        with phase(progress, "hashing"):
            upload = _compared(api, folder, destination, repo, head, created=there is None)
        _check_tag(repo, destination.tag, tagged, moves=bool(upload.sent or upload.removed))
        if dry_run:
            return upload
        for wait in (*WAITS, None):
            try:
                with phase(None if bars else progress, "sending", sum(upload.sent.values())):
                    return _commit(api, folder, destination, upload, head)
            except Exception as error:
                if wait is None or not is_passing(error):
                    raise
                time.sleep(wait)
                head = (_refs(api, repo) or {}).get(("branch", destination.branch))
                upload = _compared(api, folder, destination, repo, head, created=there is None)
        raise AssertionError("the last attempt returns or raises")


def checked(destination: Destination, *, writable: bool = True) -> Destination:
    """Return a destination with its owner's name, by default the holder of the token; asks the Hub once.

    Raises:
        HubError: there is no token, it is not accepted, or it is read-only although `writable` is set.
    """
    if destination.checked or ("/" in destination.repo and not writable):
        return destination
    with hub_errors("the token cannot be checked"):
        who = _api().whoami()
        access = who.get("auth", {}).get("accessToken") or {}
        if writable and access.get("role") == "read":
            raise HubError(f"the token `{access.get('displayName')}` of `{who['name']}` can only read", hint=LOGIN)
        repo = destination.repo if "/" in destination.repo else f"{who['name']}/{destination.repo}"
        return replace(destination, repo=repo, checked=writable)


def has_model(repo: str, branch: str) -> bool:
    """Return whether a branch of a repository on the Hub holds a complete model.

    Raises:
        HubError: the Hub refuses, or cannot be reached.
    """
    with hub_errors(f"`{repo}` cannot be read"):
        head = (_refs(_api(), repo) or {}).get(("branch", branch))
        files = {} if head is None else files_at(_api(), repo, head)
        return "config.json" in files and any(map(WEIGHTS.fullmatch, files))


def _api() -> HfApi:
    from huggingface_hub import HfApi

    return HfApi(library_name="mcore-convert", library_version=VERSION)


Refs = dict[tuple[str, str], str]


def _refs(api: HfApi, repo: str) -> Refs | None:
    """Return the commits of a repository's branches and tags; None if the repository does not exist."""
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        refs = api.list_repo_refs(repo)
    except RepositoryNotFoundError:
        return None
    named = {"branch": refs.branches, "tag": refs.tags}
    return {(kind, ref.name): ref.target_commit for kind, listed in named.items() for ref in listed}


def _make_branch(api: HfApi, repo: str, branch: str) -> str:
    """Create a branch if missing, at the first commit, which has no model; return its head."""
    refs = _refs(api, repo) or {}
    if ("branch", branch) not in refs:
        first: str = api.list_repo_commits(repo)[-1].commit_id
        api.create_branch(repo, branch=branch, revision=first, exist_ok=True)
        return first
    return refs["branch", branch]


def _check_tag(repo: str, tag: str | None, tagged: str | None, *, moves: bool) -> None:
    """Refuse a tag of another commit before anything is sent: tags are not moved."""
    if tagged is not None and moves:
        raise HubError(
            f"`{repo}` has a tag `{tag}` already, of another commit",
            hint=f"choose another tag, or remove it: hf repos tag delete {repo} {tag}",
        )


def _check_private(api: HfApi, repo: str) -> None:
    """Refuse to send a private model to a public repository."""
    if not api.model_info(repo).private:
        raise HubError(
            f"`{repo}` is there already, and is public",
            hint=f"make it private first: hf repos settings {repo} --private; or leave out --private",
        )


def _compared(
    api: HfApi, folder: Path, destination: Destination, repo: str, head: str | None, *, created: bool
) -> Upload:
    """Compare a directory with a commit on the Hub."""
    local = files_of(folder)
    remote = files_at(api, repo, head) if head is not None else {}
    kept = {name for name, path in local.items() if name in remote and is_same(path, remote[name])}
    sizes = {name: path.stat().st_size for name, path in local.items()}
    has_tokenizer = any(_matches(name, TOKENIZER_FILES) for name in local)
    stale = (*(TOKENIZER_FILES if has_tokenizer else ()), GENERATION_CONFIG, MANIFEST)
    removed = [name for name in remote if name not in local and (WEIGHTS.fullmatch(name) or _matches(name, stale))]
    return Upload(
        repo=repo,
        url=f"{api.endpoint}/{repo}" + (f"/tree/{destination.branch}" if destination.branch != MAIN else ""),
        branch=destination.branch,
        tag=destination.tag,
        created=created,
        sent={name: size for name, size in sizes.items() if name not in kept},
        kept={name: size for name, size in sizes.items() if name in kept},
        removed=tuple(sorted(removed)),
        commit=None,
        dry_run=True,
    )


def files_of(folder: Path) -> dict[str, Path]:
    """Return the files to send by their names in the repository; hidden files, and other models in folders below, stay.

    Raises:
        UnreadableCheckpoint: there are none.
    """
    shown = {name: path for name, path in files_in(folder).items() if not any(p[0] == "." for p in Path(name).parts)}
    others = [f"{Path(name).parent}/" for name in shown if Path(name).name == CONFIG and "/" in name]
    own = {name: path for name, path in shown.items() if not name.startswith(tuple(others))}
    if not own:
        raise UnreadableCheckpoint(f"`{folder}` has no files to send")
    return own


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _commit(api: HfApi, folder: Path, destination: Destination, planned: Upload, head: str | None) -> Upload:
    """Make the commit and the tag of an upload."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    commit = None
    if planned.sent or planned.removed:
        paths = files_of(folder)
        additions = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=paths[name]) for name in planned.sent]
        deletions = [CommitOperationDelete(path_in_repo=name, is_folder=False) for name in planned.removed]
        message = destination.message or "Upload model with mcore-convert"
        commit = api.create_commit(
            planned.repo,
            [*additions, *deletions],
            commit_message=message,
            revision=planned.branch,
            parent_commit=head,
        ).oid
        check_arrived(api, planned.repo, commit, additions, planned.kept, planned.removed)
    if destination.tag is not None:
        api.create_tag(planned.repo, tag=destination.tag, revision=commit or head, exist_ok=True)
    return replace(planned, commit=commit, dry_run=False)


@contextlib.contextmanager
def _bars(shown: bool) -> Iterator[None]:
    """Scope in which the client shows progress bars, or none."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    before = are_progress_bars_disabled()
    if not shown and not before:
        disable_progress_bars()
    try:
        yield
    finally:
        if not shown and not before:
            enable_progress_bars()
