"""Files that travel with a model beside its weights: its tokenizer and its Hugging Face configuration.

Every checkpoint has them in a folder `hf`, like one that was converted from Hugging Face, so that a conversion back
uses them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mcore_convert.formats.files.model_folder import CARRIED_FILES, CONFIG, carried_files
from mcore_convert.formats.megatron.run_directory import CARRIED
from mcore_convert.storage.sources import Limit, content_of
from train_entry.config.schema import Config

NO_TOKENIZER = (CONFIG, "generation_config.json")


def files_of(config: Config, path: Path | None) -> dict[str, bytes]:
    """Return the files to put into the checkpoints of a run, by name; read at once, as their directory may be removed.

    Args:
        path: the checkpoint that the run starts from.
    """
    there = path / CARRIED if path is not None else None
    files = {} if there is None or not there.is_dir() else _read(there)
    if config.data.tokenizer is not None:
        kept = {name: content for name, content in files.items() if name in NO_TOKENIZER}
        given = _read(_directory_of(config.data.tokenizer))
        files = {**{name: content for name, content in given.items() if name not in NO_TOKENIZER}, **kept}
    return {f"{CARRIED}/{name}": content for name, content in files.items()}


def _read(directory: Path) -> Mapping[str, bytes]:
    names = [name for name in (*carried_files(directory), CONFIG) if (directory / name).is_file()]
    return {name: content_of(directory / name, Limit.TOKENIZER) for name in names}


def _directory_of(tokenizer: str) -> Path:
    """Return the directory of a tokenizer's files; for one of the Hub, that of the download that loading it made."""
    if Path(tokenizer).is_dir():
        return Path(tokenizer)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(tokenizer, allow_patterns=list(CARRIED_FILES), local_files_only=True))
