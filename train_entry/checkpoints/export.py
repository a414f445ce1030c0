"""A saved checkpoint in the form that transformers reads."""

from __future__ import annotations

from pathlib import Path

from mcore_convert.api import convert
from mcore_convert.errors import ConvertError
from train_entry.checkpoints import folder
from train_entry.checkpoints.source import CHECKPOINTS
from train_entry.config.schema import Config


def export_hf(config: Config, iteration: int) -> Path:
    """Convert the checkpoint of an iteration into `hf` in the run's directory, or with `each` into `hf/iter_*`.

    The directory appears when it is complete, and replaces an older one. In one process, which needs no GPU.

    Raises:
        ConvertError: the checkpoint cannot be represented there, or transformers does not read the result.
    """
    source = folder.iteration_path(config.run_dir / CHECKPOINTS, iteration)
    target = config.run_dir / "hf"
    if config.checkpoint.export_hf == "each":
        target = target / source.name
    convert(source, target, to="hf", optimizer=False, overwrite=True)
    check(target)
    return target


def check(path: Path) -> None:
    """Prove that transformers reads the configuration.

    Raises:
        ConvertError: it does not.
    """
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:  # transformers lets through what its many readers raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConvertError(f"transformers does not read the export `{path}`: {reason}") from error
