"""Every iteration of a run, exported once: each to a directory, or to a branch of a repository on the Hub.

The state of a sweep is what it has produced, so it may be stopped at any moment and started again: a directory gets its
name once it is complete and proven, and a branch gets its model in one commit.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Unpack

from mcore_convert.checkpoints.identify import open_checkpoint
from mcore_convert.checkpoints.runs import Run, find_run, history_of
from mcore_convert.errors import ConvertError, HubError, MappingError, UnreadableCheckpoint
from mcore_convert.options import ModelFolderOptions, PathLike, check_names
from mcore_convert.publishing.publish import Export, hand_over
from mcore_convert.publishing.upload import Destination, Upload, checked, has_model, upload
from mcore_convert.storage.paths import absent
from mcore_convert.storage.phases import phase
from mcore_convert.storage.progress import Progress
from mcore_convert.storage.remote import RemotePath, located
from mcore_convert.storage.views import file_errors

POLL_SECONDS = 30.0

State = Literal["exported", "there", "refused"]


@dataclass(frozen=True)
class Swept:
    """Result of one iteration: exported now, `there` already, or refused with an error.

    `path` is its directory, if it has one; `upload` describes the files sent to the Hub.
    """

    iteration: int
    state: State
    path: Path | None
    export: Export | None = None
    upload: Upload | None = None
    error: ConvertError | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "iteration": self.iteration,
            "state": self.state,
            "path": None if self.path is None else str(self.path),
            "export": None if self.export is None else self.export.as_dict(),
            "upload": None if self.upload is None else self.upload.as_dict(),
            "error": None if self.error is None else str(self.error),
        }


@dataclass(frozen=True)
class _Sweep:
    """Options that hold for all iterations of a sweep."""

    folder: Path | None
    target: Destination | None
    options: ModelFolderOptions
    bars: bool
    progress: Progress | None


def export_all(
    run: PathLike,
    destination: PathLike | None = None,
    *,
    push_to_hub: str | None = None,
    private: bool = False,
    watch: bool = False,
    interval: float = POLL_SECONDS,
    until: int | None = None,
    progress: Progress | None = None,
    bars: bool = False,
    **options: Unpack[ModelFolderOptions],
) -> Iterator[Swept]:
    """Export every iteration of a run that is not exported yet, in their order, and yield each when it is done.

    An iteration whose checkpoint cannot be exported is yielded as `refused`, and the sweep goes on.

    Args:
        run: the directory of a training run, or the one that has its `iter_*`.
        destination: parent of the directories `iter_*`; `RUN/hf` unless given. With `push_to_hub` no directory is kept
            unless one is given.
        push_to_hub: a repository that gets a branch `iter_*` for each iteration.
        private: make a new repository private.
        watch: wait for further iterations, until the last one that the run plans.
        interval: seconds between two checks of a running training.
        until: end after this iteration, and do not watch for others.
        progress, bars: as for `export`.
        options: the content of the exports, as listed in `mcore_convert.options.ModelFolderOptions`.

    Raises:
        ConvertError: there is no such run, or an error that is not specific to one iteration: no tokenizer, no room, no
            answer from the Hub.
    """
    check_names("export_all", ModelFolderOptions, options)
    path = located(run)
    if isinstance(path, RemotePath):
        hint = "export its iterations one by one"
        raise UnreadableCheckpoint(f"`{path}` is in a remote store, and runs are watched on this machine", hint=hint)
    if not path.exists():
        raise absent(path)
    if not path.is_dir():
        raise UnreadableCheckpoint(f"`{path}` is not a directory", hint="name the directory of a training run")
    target = None if push_to_hub is None else checked(Destination(push_to_hub, private))
    folder = Path(destination) if destination is not None else None
    done: dict[int, State] = {}
    while True:
        with file_errors():
            training = find_run(path)
            if training is None and not watch:
                raise UnreadableCheckpoint(
                    f"`{path}` is no training run", hint="its checkpoints are called iter_*, in it or in `checkpoints`"
                )
            waiting = _waiting(training, done, until)
        if training is not None and folder is None and target is None:
            folder = training.path / "hf"
        sweep = _Sweep(folder, target, options, bars, progress)
        for iteration, checkpoint in waiting.items():
            swept = _one(sweep, iteration, checkpoint, watch=watch)
            if swept is None:  # removed by the run, or to be retried
                continue
            done[iteration] = swept.state
            yield swept
        if not watch:
            return
        last = until if until is not None else _last_of(training)
        left = [iteration for iteration, checkpoint in waiting.items() if iteration not in done and checkpoint.exists()]
        if last is not None and max(done, default=-1) >= last and not left:
            return
        with phase(progress, "waiting for iterations"):
            time.sleep(interval)


def _waiting(run: Run | None, done: dict[int, State], until: int | None) -> dict[int, Path]:
    """Return the iterations that exist and have not been handled."""
    there = {} if run is None else run.iterations()
    return {n: path for n, path in there.items() if n not in done and (until is None or n <= until)}


def _last_of(run: Run | None) -> int | None:
    """Return the last iteration that a training plans, as recorded in its newest checkpoint."""
    try:
        with file_errors():
            newest = max((run.iterations() if run else {}).items(), default=None)
            checkpoint = None if newest is None else open_checkpoint(newest[1])
            return None if checkpoint is None else history_of(checkpoint.common).last_iteration
    except ConvertError:
        return None


def _one(sweep: _Sweep, iteration: int, checkpoint: Path, *, watch: bool) -> Swept | None:
    """Export one iteration; None if skipped."""
    final = None if sweep.folder is None else sweep.folder / checkpoint.name
    try:
        return _export_one(sweep, iteration, checkpoint, final)
    except (UnreadableCheckpoint, MappingError) as error:
        return Swept(iteration, "refused", final, error=error) if checkpoint.exists() else None
    except HubError:
        if not watch:
            raise
        return None  # the connection may be back at the next check


def _export_one(sweep: _Sweep, iteration: int, checkpoint: Path, final: Path | None) -> Swept:
    target = sweep.target
    is_there = final is not None and final.exists()
    if is_there and final is not None:
        open_checkpoint(final)  # proves it complete, from headers and the index
    if target is not None and has_model(target.repo, checkpoint.name):
        return Swept(iteration, "there", final)
    if target is None and is_there:
        return Swept(iteration, "there", final)
    if target is not None:
        message = f"Export of iteration {iteration}"
        target = replace(target, branch=checkpoint.name, message=message)
        if is_there and final is not None:
            return Swept(
                iteration, "exported", final, upload=upload(final, target, progress=sweep.progress, bars=sweep.bars)
            )
    made = hand_over(checkpoint, final, sweep.options, target, progress=sweep.progress, bars=sweep.bars)
    return Swept(iteration, "exported", final, export=made, upload=made.upload)
