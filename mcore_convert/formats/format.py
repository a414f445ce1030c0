"""The entry of a format in the registry: functions that detect, open and reserve its checkpoints."""

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
    """Options of a format without options."""


@dataclass(frozen=True)
class Resume:
    """Requirements for resuming from an optimizer's state in a format: Megatron's arguments, and notes for the user."""

    arguments: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def _nothing_to_resume(training: Training, release: Release, args: Mapping[str, Any]) -> Resume:
    """Return no requirements: for a format that needs none, or holds no optimizer state."""
    return Resume()


def _no_directory(path: Path) -> None:
    """Return None: for a format whose checkpoints are only named by their directory."""


@dataclass(frozen=True)
class Format:
    """The registry's entry of an on-disk format.

    `detect` recognises a directory by features of this format only; `open` reads its headers, with Megatron arguments
    that override stored ones; `reserve` lays out a new checkpoint, and is None for a read-only format. `options` is a
    dataclass of the user's options for a target, `file_names` are names by which a reader recognises a checkpoint.
    `holds_optimizer`: the format can hold optimizer state. `random_axis` is the rank that distinguishes random states,
    in addition to pipeline and tensor rank, if experts are distributed over ranks; None if there is no such axis.
    `directory_of` finds the checkpoint of a file or folder in it; None for any other path. `resume` returns, for the
    arguments of a run, what a release of Megatron-LM requires to load the optimizer's state. `ckpt_format` is the value
    of Megatron-LM's `--ckpt-format`; None if Megatron-LM does not load the format. `arguments` are those specific to
    runs that save and load the format.
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
