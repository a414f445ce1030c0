"""A saved checkpoint in the form that transformers reads."""

from __future__ import annotations

from pathlib import Path

from mcore_convert.checkpoints.runs import CHECKPOINTS
from mcore_convert.errors import ConvertError
from mcore_convert.formats.megatron.run_directory import CARRIED
from mcore_convert.publishing.publish import export
from mcore_convert.publishing.tokenizer import read_tokenizer
from train_entry.checkpoints import folder
from train_entry.config.schema import Config


def export_hf(config: Config, iteration: int) -> Path:
    """Export the checkpoint of an iteration to `hf/iter_*` in the run's directory, as `mcore-convert export` does.

    The directory appears when it is complete, and replaces an older one. Runs in one process, without a GPU.

    Raises:
        ConvertError: the model has no such form, or transformers cannot read the result.
    """
    source = folder.iteration_path(config.run_dir / CHECKPOINTS, iteration)
    target = config.run_dir / "hf" / source.name
    has_tokenizer = (source / CARRIED).is_dir() and read_tokenizer(source / CARRIED) is not None
    export(  # mock data have no tokenizer
        source,
        target,
        with_tokenizer=has_tokenizer,
        ignore_keys=config.checkpoint.ignore_keys,
        overwrite=True,
    )
    check(target)
    return target


def check(path: Path) -> None:
    """Prove that transformers reads the configuration.

    Raises:
        ConvertError: it cannot.
    """
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:  # transformers lets errors of its many readers through
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConvertError(f"transformers does not read the export `{path}`: {reason}") from error
