"""Models on the Hugging Face Hub as sources."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from mcore_convert.errors import UnreadableCheckpoint, UnwritableTarget
from mcore_convert.formats.files.model_folder import CARRIED_FILES, CONFIG, INDEX, TOKENIZER_FILES
from mcore_convert.storage.paths import absent, near_miss
from mcore_convert.storage.remote import RemotePath, located
from mcore_convert.storage.sending import source_at
from mcore_convert.storage.threads import started

TIMEOUT = 10.0  # seconds to wait for an answer of a Hub that is reachable
PATIENCE = 4.0  # seconds to wait for its first answer, unless HF_HUB_ETAG_TIMEOUT is set
REPO_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def local_path(source: str, revision: str | None = None) -> Path:
    """Return the directory that a source names: itself where it exists, else the Hub's model of that name, downloaded.

    Args:
        source: a path, or a Hub id (`gpt2`, `meta-llama/Llama-3.2-1B`).
        revision: branch, tag or commit on the Hub.

    Raises:
        UnreadableCheckpoint: it is neither a directory nor a model on the Hub, or it is a misspelled path.
    """
    return existing(source) or downloaded(source, revision)


def existing(source: str | Path) -> Path | None:
    """Return the path that a source names; None if there is none, so that it may be a model on the Hub.

    Raises:
        UnreadableCheckpoint: it is a URL with nothing there, or the checkpoint there is incomplete.
    """
    path = source_at(source)
    if path.exists():
        return path
    if isinstance(path, RemotePath):
        raise absent(path)
    return None


def downloaded(source: str, revision: str | None = None) -> Path:
    """Download the Hub's model of this name, and return its directory.

    Raises:
        UnreadableCheckpoint: see `local_path`.
    """
    return _download(source, revision, _files_of_model)


def tokenizer_path(source: str) -> Path:
    """Return the directory of a tokenizer: itself where it exists, else that of the Hub's model of that name,
    downloaded.

    Raises:
        UnreadableCheckpoint: it is neither a directory nor a model on the Hub, or it is a misspelled path.
    """
    return existing(source) or _download(source, None, lambda files: [*TOKENIZER_FILES])


def unreachable() -> str | None:
    """Return why the Hub cannot be reached; None if it answers.

    The Hub's client retries failures for most of a minute, and waits for a name server without a limit, so it is called
    only after the Hub has answered once.
    """
    from huggingface_hub import constants

    return "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else _no_sign_of(constants.ENDPOINT)


@cache
def _no_sign_of(endpoint: str) -> str | None:
    from huggingface_hub.utils import get_session

    patience = float(os.environ.get("HF_HUB_ETAG_TIMEOUT") or PATIENCE)
    reasons: list[str | None] = []

    def ask() -> None:
        try:
            get_session().head(endpoint, timeout=patience)
            reasons.append(None)  # any answer will do
        except Exception as error:  # raised by the client's HTTP library, which has been replaced before
            reasons.append(first_line(error))

    started(ask).join(patience)
    return reasons[0] if reasons else f"no answer in {patience:g} s"


def _files_of_model(files: list[str]) -> list[str]:
    safe = any(file == "model.safetensors" or file == INDEX for file in files)
    weights = ["model*.safetensors", INDEX] if safe else ["pytorch_model*.bin", "pytorch_model.bin.index.json"]
    return [CONFIG, *CARRIED_FILES, *weights]


def streamed(source: str, revision: str | None = None) -> Path:
    """Return the Hub's model of this name as a remote path at its current commit; nothing is downloaded yet.

    Raises:
        UnreadableCheckpoint: see `local_path`.
    """
    from huggingface_hub import HfApi

    _check_name(source, revision)
    reason = unreachable()
    if reason is not None:
        raise UnreadableCheckpoint(f"`{source}` cannot be streamed, as the Hub cannot be reached: {reason}")
    with _hub_errors(source):
        model = HfApi().model_info(source, revision=revision, timeout=TIMEOUT)
    return located(f"hf://{model.id}@{model.sha}")


def _check_name(source: str, revision: str | None) -> None:
    """Prove that a name that is not a path may be the name of a repository on the Hub."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    is_slip = not REPO_ID.fullmatch(source) or source.startswith(".") or (revision is None and near_miss(Path(source)))
    try:
        if not is_slip:
            validate_repo_id(source)
            return
    except HFValidationError as error:
        raise absent(source) from error
    raise absent(source)


def _download(repo: str, revision: str | None, patterns: Callable[[list[str]], list[str]]) -> Path:
    """Download the files that match the patterns; `patterns` computes these from the names of all files."""
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    _check_name(repo, revision)
    reason = unreachable()
    if reason is not None:
        if constants.HF_HUB_OFFLINE:  # the client itself then uses what was downloaded before
            with contextlib.suppress(LocalEntryNotFoundError):
                return Path(snapshot_download(repo, revision=revision, local_files_only=True))
        hint = f"download it where there is a network: `hf download {repo}`, then set HF_HUB_OFFLINE=1"
        raise UnreadableCheckpoint(f"`{repo}` is no directory, and the Hub cannot be reached: {reason}", hint=hint)
    with _hub_errors(repo):
        # One request with a timeout: the call that lists files retries it for half a minute if there is no network.
        model = HfApi().model_info(repo, revision=revision, timeout=TIMEOUT)
        files = [file.rfilename for file in model.siblings or ()]
        return Path(snapshot_download(repo, revision=revision, allow_patterns=patterns(files)))


@contextlib.contextmanager
def _hub_errors(repo: str) -> Iterator[None]:
    """Scope in which the errors of the Hub's client become errors of this package."""
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        yield
    except RepositoryNotFoundError as error:
        raise UnreadableCheckpoint(
            f"`{repo}` is neither a directory nor a model on the Hub",
            hint="a gated or private model needs a token: `hf auth login`",
        ) from error
    except Exception as error:  # the client lets errors of its HTTP library through, and has replaced that library
        if isinstance(error, OSError) and error.errno is not None:  # an error of a file, not of the network
            raise UnwritableTarget(
                f"cannot download `{repo}`: `{error.filename or 'the cache'}`: {error.strerror}",
                hint="HF_HOME names the directory for downloads: choose one that can be written and has room",
            ) from error
        reason = first_line(error)
        raise UnreadableCheckpoint(f"`{repo}` is no directory, and the Hub cannot be reached: {reason}") from error


def first_line(error: BaseException) -> str:
    """Return the message of an error of the client, in one line."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
