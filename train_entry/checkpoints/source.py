"""Start of a run: its own newest checkpoint, another run, or the weights of a model in any format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from mcore_convert.checkpoints.download import local_path
from mcore_convert.checkpoints.identify import Model, model_of, open_checkpoint
from mcore_convert.checkpoints.runs import CHECKPOINTS, OURS, find_run
from mcore_convert.conversion.execute import check_unchanged, execute
from mcore_convert.conversion.prepare import plan_conversion
from mcore_convert.conversion.target import Target
from mcore_convert.errors import UnreadableCheckpoint
from mcore_convert.formats.base import Checkpoint
from mcore_convert.formats.files import dcp
from mcore_convert.formats.megatron.run_directory import iterations, resolve
from mcore_convert.formats.torch_dist.checkpoint import TORCH_DIST, TorchDistCheckpoint
from mcore_convert.spec.layout import Layout
from mcore_convert.storage.marker import new_id, unfinished, unfinished_ones
from mcore_convert.storage.paths import absent
from mcore_convert.storage.sources import Stamp, watched
from mcore_convert.storage.views import file_errors
from train_entry.checkpoints import folder
from train_entry.checkpoints.folder import Newest
from train_entry.config.schema import Config

START = "start"  # base of the name of a temporary file in a run's directory: a foreign checkpoint, in our format


@dataclass(frozen=True)
class Start:
    """Start of training: with `training` from the whole state of a checkpoint, else from its weights.

    `path` is a checkpoint or a directory of several, in any format; `notes` are for the user.
    """

    path: Path
    training: bool
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Source:
    """Open checkpoint of a start: a run opens it once, to identify its model and to load it.

    `stamps` show whether one of its files has changed since.
    """

    start: Start
    model: Model
    stamps: Mapping[Path, Stamp]

    @property
    def ours(self) -> TorchDistCheckpoint | None:
        """The checkpoint if a run of this project saved it; None for others."""
        checkpoint = self.model.checkpoint
        return checkpoint if isinstance(checkpoint, TorchDistCheckpoint) and is_ours(checkpoint) else None


def source_of(config: Config) -> Source | None:
    """Open the checkpoint that a run starts from: its own, another run's, or a model's; None for new weights.

    Reads headers only.

    Raises:
        ConvertError: it does not exist or cannot be read, or the run has checkpoints but no complete one.
    """
    wanted = config.checkpoint
    own = config.run_dir / CHECKPOINTS
    if wanted.resume and own.is_dir():
        newest = folder.newest(own)
        if newest.path is not None:
            notes = tuple(f"damaged, and not used: {line}" for line in newest.damaged)
            return _opened(newest, Start(newest.path, True, notes), config)
        if newest.damaged:
            raise UnreadableCheckpoint(
                f"no checkpoint in `{own}` is whole",
                items=newest.damaged,
                hint="start anew with checkpoint.resume=false, or choose another `run_dir`",
            )
    if wanted.load is not None:
        if not wanted.load.exists():
            raise absent(wanted.load)
        return _newest_in(wanted.load, config, training=True)
    return init_of(config) if wanted.init is not None else None


def init_of(config: Config) -> Source:
    """Open the weights that `checkpoint.init` names.

    Raises:
        ConvertError: they do not exist or cannot be read.
    """
    assert config.checkpoint.init is not None
    path = local_path(config.checkpoint.init, config.checkpoint.revision)
    return _newest_in(path, config, training=False)


def in_our_format(source: Source, config: Config) -> Path:
    """Return the `iter_*` or `release` directory of a source, converted into `START` if another program wrote it.

    Raises:
        ConvertError: it is refused, or its files have changed since it was opened.
    """
    if source.ours is not None:
        check_unchanged(source.stamps)
        return source.ours.path
    forget(config)  # the remains of a killed start take as much room as this one
    start = unfinished(config.run_dir / START, new_id())
    target = Target(start, TORCH_DIST, Layout(tp=config.parallel.tp), optimizer=source.start.training)
    with file_errors():
        plan = plan_conversion(source.model, target)
        execute(replace(plan, stamps={**plan.stamps, **source.stamps}))
    return resolve(start, dcp.exists, dcp.METADATA)


def forget(config: Config) -> None:
    """Remove the checkpoints that `in_our_format` has made, and nothing else of that name."""
    if config.run_dir.is_dir():
        for start in unfinished_ones(config.run_dir / START):
            folder.remove(start)


def is_ours(checkpoint: Checkpoint) -> bool:
    """Return whether a run of this project saved a checkpoint."""
    return checkpoint.format == TORCH_DIST and OURS in checkpoint.common.state


def _newest_in(path: Path, config: Config, *, training: bool) -> Source:
    """Open the newest checkpoint of a directory with several in our format; else the directory as it is."""
    run = find_run(path)
    path = path if run is None else run.checkpoints
    newest = Newest(path)
    if any(map(dcp.exists, iterations(path))):
        newest = folder.newest(path)
        if newest.path is None:
            raise UnreadableCheckpoint(f"no checkpoint in `{path}` is whole", items=newest.damaged)
        path = newest.path
    return _opened(newest, Start(path, training), config)


def _opened(newest: Newest, start: Start, config: Config) -> Source:
    """Return a checkpoint with its model; opens it unless it is open and proven complete."""
    with file_errors(), watched() as stamps:
        checkpoint = newest.checkpoint or open_checkpoint(start.path)
        model = model_of(checkpoint, ignore_keys=config.checkpoint.ignore_keys)
    return Source(start, model, {**stamps, **newest.stamps})
