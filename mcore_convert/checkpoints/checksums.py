"""The checksums that writers have stored of their tensors, compared with the bytes where these are read anyway."""

from __future__ import annotations

import zlib
from concurrent.futures import ThreadPoolExecutor

from mcore_convert.errors import UnreadableCheckpoint
from mcore_convert.formats.base import Checkpoint
from mcore_convert.storage.elements import CAST_BLOCK, WORKERS, Files
from mcore_convert.storage.views import Sum


def check_sums(checkpoint: Checkpoint) -> int:
    """Prove that tensors have the checksums that are stored with them; returns how many bytes have one.

    `torch.save` stores them unless it was told not to (`torch.serialization.set_crc32_options`).

    Raises:
        UnreadableCheckpoint: with every record that has another.
    """
    with Files() as files, ThreadPoolExecutor(WORKERS) as pool:

        def damaged(sums: list[Sum]) -> list[str]:
            return [f"{each.record} of {each.path}" for each in sums if _crc(files, each) != each.checksum]

        every = list(checkpoint.sums)
        problems = [line for lines in pool.map(damaged, ([each] for each in every)) for line in lines]
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
