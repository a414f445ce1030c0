"""The options of a target in one of Megatron's formats."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MegatronOptions:
    """`implementation` is the layer spec whose names the files have; that of the source for None."""

    implementation: str | None = None


@dataclass(frozen=True)
class DcpOptions(MegatronOptions):
    """Of a target of `.distcp` files: `max_shard_size` is the largest size of one, in bytes.

    A chunk is never cut, so that a file of one chunk may be larger. Files of the size that it has unless given are read
    by several threads.
    """

    max_shard_size: int = 2**31
