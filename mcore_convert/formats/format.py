"""A format as the registry has it: how its checkpoints are detected, opened and reserved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mcore_convert.formats.base import Checkpoint, Side, Training
from mcore_convert.formats.request import Request, Reservation
from mcore_convert.spec.releases import Release


@dataclass(frozen=True)
class NoOptions:
    """The options of a format that has none."""


@dataclass(frozen=True)
class Resume:
    """What a run needs to go on from an optimizer's state in a format: Megatron's arguments, and notes for the user."""

    arguments: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def _nothing_to_resume(training: Training, release: Release, args: Mapping[str, Any]) -> Resume:
    """Return what a format says that needs nothing, or holds no optimizer state."""
    return Resume()


def _no_directory(path: Path) -> None:
    """Answer for a path of a format where only the directory itself stands for a checkpoint."""


@dataclass(frozen=True)
class Format:
    """An on-disk format, as the registry has it.

    `detect` claims a directory by what only this format has in it; `open` reads its headers, with Megatron arguments
    that take the place of stored ones; `reserve` lays out a new one, and is None for a format that is only read.
    `options` is a dataclass of what a user may choose for a target, `file_names` are what a reader would recognise a
    checkpoint by. `holds_optimizer`: it has a place for optimizer state, too. `random_axis` is the rank, beside those
    of pipeline and tensor, by which it tells random states apart where experts are spread; None where it has none.
    `directory_of` finds the checkpoint that one of its files, or a folder in it, belongs to; None for any other path.
    `resume` says what Megatron-LM of a release must be told to find the optimizer's state, from the arguments of the
    run. `ckpt_format` is Megatron-LM's own word for the format, as `--ckpt-format` takes it; None where Megatron-LM
    does not load it. `arguments` are those of the runs that save and load it and no other.
    """

    name: str
    side: Side
    detect: Callable[[Path], bool]
    open: Callable[[Path, Mapping[str, Any]], Checkpoint]
    reserve: Callable[[Request], tuple[Checkpoint, Reservation]] | None = None
    options: type[Any] = NoOptions
    file_names: str = ""
    holds_optimizer: bool = False
    random_axis: str | None = None
    directory_of: Callable[[Path], Path | None] = _no_directory
    ckpt_format: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    resume: Callable[[Training, Release, Mapping[str, Any]], Resume] = _nothing_to_resume
