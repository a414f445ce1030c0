"""Start of a run: its own newest checkpoint, another run, or the weights of a model in any format."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mcore_convert.api import convert
from mcore_convert.checkpoints.download import local_path
from mcore_convert.checkpoints.runs import CHECKPOINTS, find_run
from mcore_convert.errors import ConvertError, UnreadableCheckpoint
from mcore_convert.formats.files import dcp
from mcore_convert.formats.megatron.run_directory import iterations, resolve
from mcore_convert.formats.torch_dist.checkpoint import detect, open_torch_dist
from mcore_convert.storage.marker import new_id, unfinished, unfinished_ones
from mcore_convert.storage.paths import absent
from train_entry.checkpoints import folder
from train_entry.checkpoints.contents import OURS
from train_entry.config.schema import Config

START = "start"  # becomes an unfinished file's name in a run's directory: a foreign checkpoint, in our format


@dataclass(frozen=True)
class Source:
    """Where training starts from. With `training` it goes on with all that the checkpoint has, else with its weights.

    `path` is a checkpoint or a directory of several, in any format; `notes` is what a user should know of it.
    """

    path: Path
    training: bool
    notes: tuple[str, ...] = ()


def source_of(config: Config) -> Source | None:
    """Return the checkpoint that a run starts from: its own, another run's, or a model's; None for new weights.

    Raises:
        ConvertError: it does not exist, or the run has checkpoints and none of them is whole.
    """
    wanted = config.checkpoint
    own = config.run_dir / CHECKPOINTS
    if wanted.resume and own.is_dir():
        newest = folder.newest(own)
        if newest.path is not None:
            return Source(newest.path, True, tuple(f"damaged, and not used: {line}" for line in newest.damaged))
        if newest.damaged:
            raise UnreadableCheckpoint(
                f"no checkpoint in `{own}` is whole",
                items=newest.damaged,
                hint="start anew with checkpoint.resume=false, or choose another `run_dir`",
            )
    if wanted.load is not None:
        return _of_run(wanted.load)
    return init_of(config) if wanted.init is not None else None


def init_of(config: Config) -> Source:
    """Return the weights that `checkpoint.init` names.

    Raises:
        ConvertError: they do not exist.
    """
    assert config.checkpoint.init is not None
    return Source(_newest_in(local_path(config.checkpoint.init, config.checkpoint.revision)), False)


def in_our_format(source: Source, config: Config) -> Path:
    """Return the `iter_*` or `release` directory of a source,
    converted into `START` where this project did not write it.

    Raises:
        ConvertError: it is refused, or it has no optimizer state to go on with.
    """
    if is_ours(source.path):
        return source.path
    forget(config)
    start = unfinished(config.run_dir / START, new_id())
    convert(
        source.path,
        start,
        to="torch_dist",
        tp=config.parallel.tp,
        optimizer=source.training,
        ignore_keys=config.checkpoint.ignore_keys,
    )
    path = resolve(start, dcp.exists, dcp.METADATA)
    if source.training and not open_torch_dist(path).optimizer_keys:
        forget(config)
        raise ConvertError(
            f"`{source.path}` has no optimizer state to go on with",
            hint="`checkpoint.init` starts a new run from its weights",
        )
    return path


def forget(config: Config) -> None:
    """Remove what `in_our_format` has made, and nothing else of that name."""
    if config.run_dir.is_dir():
        for start in unfinished_ones(config.run_dir / START):
            folder.remove(start)


def is_ours(path: Path) -> bool:
    """Return whether a directory is a checkpoint that a run of this project saved."""
    return detect(path) and OURS in open_torch_dist(path).common.state


def _of_run(path: Path) -> Source:
    """Return what a directory holds to go on with, which is a run's, one of checkpoints, or a checkpoint."""
    if not path.exists():
        raise absent(path)
    return Source(_newest_in(path), True)


def _newest_in(path: Path) -> Path:
    """Return the checkpoint to take of a directory with several in our format; else the directory as it is."""
    run = find_run(path)
    path = path if run is None else run.checkpoints
    if not any(map(dcp.exists, iterations(path))):
        return path
    newest = folder.newest(path)
    if newest.path is None:
        raise UnreadableCheckpoint(f"no checkpoint in `{path}` is whole", items=newest.damaged)
    return newest.path
