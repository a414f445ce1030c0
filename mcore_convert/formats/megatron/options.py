"""Options of a target in one of Megatron's formats."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MegatronOptions:
    """Options of any target: `implementation` is the layer spec of the names; None for that of the source."""

    implementation: str | None = None


@dataclass(frozen=True)
class DcpOptions(MegatronOptions):
    """Options of a target with `.distcp` files: `max_shard_size` is the largest size of a file, in bytes.

    A chunk is never cut, so a file of one chunk may be larger. Files of the default size are read by several threads.
    """

    max_shard_size: int = 2**31
