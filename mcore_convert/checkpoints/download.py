"""Models on the Hugging Face Hub as sources."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from mcore_convert.errors import UnreadableCheckpoint, UnwritableTarget
from mcore_convert.formats.files.model_folder import CARRIED_FILES, CONFIG, INDEX, TOKENIZER_FILES

TIMEOUT = 10.0  # seconds
REPO_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def local_path(source: str, revision: str | None = None) -> Path:
    """The directory that a source names: itself where it exists, else the Hub's model of that name, downloaded.

    Args:
        source: a path, or a Hub id (`gpt2`, `meta-llama/Llama-3.2-1B`).
        revision: branch, tag or commit on the Hub.

    Raises:
        UnreadableCheckpoint: neither a directory nor a model on the Hub.
    """
    path = Path(source)
    if path.exists():
        return path
    if not REPO_ID.fullmatch(source) or source.startswith("."):
        raise UnreadableCheckpoint(f"`{source}` does not exist")
    return _download(source, revision, _files_of_model)


def tokenizer_path(source: str) -> Path:
    """The directory of a tokenizer: itself where it exists, else that of the Hub's model of that name, downloaded.

    Raises:
        UnreadableCheckpoint: neither a directory nor a model on the Hub.
    """
    path = Path(source)
    if path.exists():
        return path
    if not REPO_ID.fullmatch(source) or source.startswith("."):
        raise UnreadableCheckpoint(f"`{source}` does not exist")
    return _download(source, None, lambda files: [*TOKENIZER_FILES])


def _files_of_model(files: list[str]) -> list[str]:
    safe = any(file == "model.safetensors" or file == INDEX for file in files)
    weights = ["model*.safetensors", INDEX] if safe else ["pytorch_model*.bin", "pytorch_model.bin.index.json"]
    return [CONFIG, *CARRIED_FILES, *weights]


def _download(repo: str, revision: str | None, patterns: Callable[[list[str]], list[str]]) -> Path:
    """Download the files that match the patterns that are made of all their names."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    try:
        # One request with a limit: the call that lists files repeats it for half a minute where there is no network.
        found = HfApi().model_info(repo, revision=revision, timeout=TIMEOUT)
        files = [file.rfilename for file in found.siblings or ()]
        return Path(snapshot_download(repo, revision=revision, allow_patterns=patterns(files)))
    except RepositoryNotFoundError as error:
        raise UnreadableCheckpoint(
            f"`{repo}` is neither a directory nor a model on the Hub",
            hint="a gated or private model needs a token: `hf auth login`",
        ) from error
    except HFValidationError as error:
        raise UnreadableCheckpoint(f"`{repo}` does not exist") from error
    except Exception as error:  # the client lets through what its HTTP library raises, and has changed that library
        if isinstance(error, OSError) and error.errno is not None:  # of a file, and not of the network
            raise UnwritableTarget(
                f"cannot download `{repo}`: `{error.filename or 'the cache'}`: {error.strerror}",
                hint="HF_HOME names the directory for downloads: choose one that can be written and has room",
            ) from error
        said = first_line(error)
        raise UnreadableCheckpoint(f"`{repo}` is no directory, and the Hub cannot be reached: {said}") from error


def first_line(error: BaseException) -> str:
    """What an error of the client says, in a line."""
    said = str(error).strip()
    return said.splitlines()[0] if said else type(error).__name__
