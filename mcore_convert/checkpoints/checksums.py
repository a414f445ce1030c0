"""Checksums that writers stored with their tensors, compared with the bytes when these are read anyway."""

from __future__ import annotations

import zlib

from mcore_convert.errors import UnreadableCheckpoint
from mcore_convert.formats.base import Checkpoint
from mcore_convert.storage.elements import CAST_BLOCK, Files
from mcore_convert.storage.threads import in_threads
from mcore_convert.storage.views import Sum


def check_sums(checkpoint: Checkpoint) -> int:
    """Prove that tensors have the checksums that are stored with them; return the number of bytes that have one.

    `torch.save` stores them unless disabled (`torch.serialization.set_crc32_options`).

    Raises:
        UnreadableCheckpoint: lists every record with a different checksum.
    """
    every = list(checkpoint.sums)
    problems: list[str] = []
    with Files() as files:

        def damage(stored: Sum) -> list[str]:
            return [] if _crc(files, stored) == stored.checksum else [f"{stored.record} of {stored.path}"]

        in_threads(damage, every, problems.extend)
    if problems:
        raise UnreadableCheckpoint(
            "tensors do not have the checksums that are stored with them",
            items=problems,
            hint="the files were damaged after they were written: copy them again",
        )
    return sum(each.size for each in every)


def _crc(files: Files, stored: Sum) -> int:
    crc = 0
    buffer = memoryview(bytearray(min(CAST_BLOCK, stored.size)))
    for done in range(0, stored.size, len(buffer)):
        with buffer[: min(len(buffer), stored.size - done)] as part:
            files.read_run(stored.path, stored.start + done, part)
            crc = zlib.crc32(part, crc)
    return crc
