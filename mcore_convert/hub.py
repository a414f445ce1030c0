"""Models on the Hugging Face Hub as sources."""

from __future__ import annotations

import re
from pathlib import Path

from mcore_convert.errors import UnreadableCheckpoint
from mcore_convert.formats.hf import CARRIED_FILES, CONFIG, INDEX

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
    return _download(source, revision)


def _download(repo: str, revision: str | None) -> Path:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    beside = [CONFIG, *CARRIED_FILES]
    try:
        # One request with a limit: the call that lists files repeats it for half a minute where there is no network.
        found = HfApi().model_info(repo, revision=revision, timeout=TIMEOUT)
        files = [file.rfilename for file in found.siblings or ()]
        safe = any(file == "model.safetensors" or file == INDEX for file in files)
        weights = ["model*.safetensors", INDEX] if safe else ["pytorch_model*.bin", "pytorch_model.bin.index.json"]
        return Path(snapshot_download(repo, revision=revision, allow_patterns=[*beside, *weights]))
    except RepositoryNotFoundError as error:
        raise UnreadableCheckpoint(
            f"`{repo}` is neither a directory nor a model on the Hub",
            hint="a gated or private model needs a token: `hf auth login`",
        ) from error
    except HFValidationError as error:
        raise UnreadableCheckpoint(f"`{repo}` does not exist") from error
    except Exception as error:  # the client lets through what its HTTP library raises, and has changed that library
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UnreadableCheckpoint(f"`{repo}` is no directory, and the Hub cannot be reached: {first}") from error
