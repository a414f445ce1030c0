"""`Checkpoints`: the checkpoints that a run starts from and writes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_convert.checkpoints.runs import CHECKPOINTS
from mcore_convert.errors import ConvertError, UnwritableTarget
from mcore_convert.formats.torch_dist.checkpoint import TorchDistCheckpoint, open_torch_dist
from train_entry.checkpoints import carried, folder
from train_entry.checkpoints.architecture import refuse_another
from train_entry.checkpoints.contents import contents
from train_entry.checkpoints.export import export_hf
from train_entry.checkpoints.loading import load
from train_entry.checkpoints.ranks import Ranks
from train_entry.checkpoints.source import Source, forget, in_our_format, init_of, is_ours
from train_entry.checkpoints.writer import Writer
from train_entry.config.schema import Config
from train_entry.state import TrainState

PROBE = ".shared"  # a file that every rank must see
PROBE_SECONDS = 10.0  # time for a network file system to show a new file


class NoOptimizer:
    """Stand-in for an optimizer, for a model that is not trained."""

    def reload_model_params(self) -> None:
        """Do nothing: there are no master copies."""


@dataclass(frozen=True)
class Restored:
    """Start of training: new weights (`path` is None), a model's weights, or with `training` the whole state of a run.

    `notes` are lines for the user.
    """

    path: Path | None
    training: bool
    iteration: int
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Stored:
    """Checkpoint in our format, open on this rank; `origin` is the one that it was converted from, or itself."""

    origin: Path
    checkpoint: TorchDistCheckpoint


def _weights_of(stages: Sequence[Any], state: TrainState) -> TrainState:
    """Return a state to load the stages of a reference model into, beside the run's own."""
    return TrainState(dict(state.args), list(stages), NoOptimizer(), None)


class Checkpoints:
    """Checkpoints of a run. Every rank has one and makes the same calls; Megatron's groups exist.

    Raises:
        ConvertError: the run's directory cannot be written, or not all ranks see it.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.folder = config.run_dir / CHECKPOINTS
        self.ranks = Ranks.all()
        self._writer = Writer(Ranks.all(), config.checkpoint.keep_last)
        self._carried: Mapping[str, bytes] = {}
        self._saved: int | None = None  # the last iteration with a checkpoint, complete or being written
        self._check_shared()

    def restore(self, state: TrainState, source: Source | None, reference: Sequence[Any] = ()) -> Restored:
        """Fill a new run from the checkpoint that it starts from.

        Args:
            source: `source_of(config)`; each rank has opened it, and rank 0 decides.
            reference: the stages of a reference model, which are filled with the weights of `checkpoint.init`.

        Raises:
            ConvertError: a checkpoint is refused, on every rank.
        """
        start = self.ranks.first(lambda: None if source is None else source.start)
        initial = start is not None and not start.training  # the reference has the same weights
        try:
            if reference and not initial:
                init = self.ranks.every(lambda: init_of(self.config) if self.ranks.is_first else None)
                self._load(_weights_of(reference, state), self._stored(init), training=False)
                self._forget()
            if start is None:
                self._carried = self.ranks.first(lambda: carried.files_of(self.config, None))
                return Restored(None, False, 0, ())
            stored = self._stored(source)
            self._carried = self.ranks.first(lambda: carried.files_of(self.config, stored.checkpoint.path))
            if reference and initial:
                self._load(_weights_of(reference, state), stored, training=False)
            notes = self._load(state, stored, training=start.training)
        finally:
            self._forget()
        if start.path.parent == self.folder:
            self._saved = state.iteration
        return Restored(start.path, start.training, state.iteration, (*start.notes, *notes))

    def _stored(self, source: Source | None) -> Stored:
        """Return rank 0's source in our format, open on each rank; a rank that has the same open reuses it."""

        def places() -> tuple[Path, Path]:
            assert source is not None
            return source.start.path, in_our_format(source, self.config)

        origin, path = self.ranks.first(places)
        ours = None if source is None else source.ours
        checkpoint = self.ranks.every(lambda: ours if ours is not None and ours.path == path else open_torch_dist(path))
        return Stored(origin, checkpoint)

    def _load(self, state: TrainState, stored: Stored, *, training: bool) -> list[str]:
        def check() -> None:
            refuse_another(state.args, stored.checkpoint.common.args or {}, stored.origin)
            if training and not is_ours(stored.checkpoint) and not stored.checkpoint.optimizer_keys:
                hint = "`checkpoint.init` starts a new run from its weights"
                raise ConvertError(f"`{stored.origin}` has no optimizer state to go on with", hint=hint)

        self.ranks.first(check)
        return load(state, stored.checkpoint, self.ranks, training=training)

    def _forget(self) -> None:
        """Remove converted checkpoints: all ranks have finished loading, and one that failed alone must not wait."""
        if self.ranks.is_first:
            forget(self.config)

    def save(self, state: TrainState) -> Path | None:
        """Save a checkpoint of this step, or begin to; None if the run saves none.

        Raises:
            UnwritableTarget: it cannot be written; earlier ones are unchanged.
        """
        if not self.config.checkpoint.save:
            return None
        path = folder.iteration_path(self.folder, state.iteration)
        if state.iteration != self._saved:
            asynchronous = self.config.checkpoint.asynchronous
            self._writer.write(contents(state, self.config), self._carried, path, asynchronous=asynchronous)
            self._saved = state.iteration
        return path

    def finish(self) -> None:
        """Wait until all saved checkpoints are on the disk.

        Raises:
            UnwritableTarget: one cannot be written.
        """
        self._writer.finish()

    def export(self) -> Path | None:
        """Write the newest checkpoint for transformers, too; None if there is none.

        Raises:
            ConvertError: it cannot be converted.
        """
        self.finish()
        saved = self._saved
        return None if saved is None else self.ranks.first(lambda: export_hf(self.config, saved))

    def _check_shared(self) -> None:
        """Prove that all ranks see the same directory, and clear remains of a killed run in it."""
        probe = self.config.run_dir / PROBE

        def prepare() -> None:
            try:
                self.config.run_dir.mkdir(parents=True, exist_ok=True)
                probe.touch()
                folder.clean(self.folder)
                forget(self.config)
            except OSError as error:
                raise UnwritableTarget(f"`{error.filename}` cannot be written: {error.strerror}") from error

        def check_visible() -> None:
            deadline = time.monotonic() + PROBE_SECONDS
            while not probe.exists():
                if time.monotonic() > deadline:
                    raise UnwritableTarget(
                        f"`{self.config.run_dir}` is not the same directory on all ranks",
                        hint="choose a `run_dir` on a file system that all nodes share",
                    )
                time.sleep(0.1)

        self.ranks.first(prepare)
        try:
            self.ranks.every(check_visible)
        finally:
            self.ranks.first(lambda: probe.unlink(missing_ok=True))
