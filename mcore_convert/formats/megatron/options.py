"""The options of a target in one of Megatron's formats."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MegatronOptions:
    """`implementation` is the layer spec whose names the files have; that of the source for None."""

    implementation: str | None = None
