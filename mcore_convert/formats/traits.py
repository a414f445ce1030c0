"""Traits of the run that wrote a checkpoint, told from its files: its modules, and how it stored them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Storage:
    """How a checkpoint is stored, in words for people; None where the format has no such thing.

    `written_by` names the versions of the program that write such files, `dialect` the spelling of the keys,
    `optimizer` the form of the optimizer's state.
    """

    num_files: int
    written_by: str | None = None
    dialect: str | None = None
    optimizer: str | None = None


@dataclass(frozen=True)
class LayerSpec:
    """Whose modules a checkpoint's names are of, in the words of `formats.megatron.modules`."""

    implementation: str
    experts: str
