"""Traits of the run that wrote a checkpoint, inferred from its files: its modules, and how they are stored."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Storage:
    """Description of how a checkpoint is stored; None for properties that the format does not have.

    `written_by` names the versions that may have written the files, `dialect` the spelling of the keys,
    `optimizer` the form of the optimizer's state.
    """

    num_files: int
    written_by: str | None = None
    dialect: str | None = None
    optimizer: str | None = None


@dataclass(frozen=True)
class LayerSpec:
    """The modules that give a checkpoint's names, as constants of `formats.megatron.modules`."""

    implementation: str
    experts: str
