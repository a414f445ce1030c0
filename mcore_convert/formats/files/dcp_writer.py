"""Layout of the files of a `torch.distributed.checkpoint` directory: the place of each archive, before it is filled.

Any number of ranks can read them: a rank finds its tensors through `.metadata` (torch,
`distributed/checkpoint/filesystem.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from mcore_convert.formats.files import torch_archive
from mcore_convert.formats.files.dcp import Place
from mcore_convert.formats.request import Reservation
from mcore_convert.spec.shard import Box
from mcore_convert.storage.views import DTYPE_SIZES, TensorMeta

# A rank loads every chunk of which it needs a part completely: smaller chunks keep its memory low.
MAX_CHUNK = 2**30
ALIGNMENT = 64


@dataclass
class DcpFiles:
    """The `.distcp` files that are laid out, each of at most `limit` bytes or one archive."""

    folder: Path
    reservation: Reservation
    limit: int
    number: int = 0
    end: int = 0
    name: str = field(init=False)  # of the current file
    path: Path = field(init=False)

    def __post_init__(self) -> None:
        self._begin()

    def place(self, archive: torch_archive.Archive) -> Place:
        """Append an archive to the current file, or to a new one."""
        start = -(-self.end // ALIGNMENT) * ALIGNMENT
        if start and start + archive.size > self.limit:
            self.number, start = self.number + 1, 0
            self._begin()
        self.end = self.reservation.sizes[self.path] = start + archive.size
        self.reservation.literals += [(self.path, start + at, content) for at, content in archive.literals]
        return Place(self.name, start, archive.size)

    def _begin(self) -> None:
        self.name = f"__{self.number}_0.distcp"
        self.path = self.folder / self.name


@lru_cache(maxsize=4096)
def archive_of(meta: TensorMeta) -> torch_archive.Archive:
    """Return the archive of one tensor; chunks of one shape, such as those of experts, differ only in content."""
    return torch_archive.lay_out(lambda refs: refs[0], [meta])


def bounded(box: Box, dtype: str, limit: int = MAX_CHUNK) -> list[Box]:
    """Return the box cut along its first dimension into boxes of at most `limit` bytes, or one row."""
    row = box.numel // box.sizes[0] * DTYPE_SIZES[dtype]
    rows = max(1, limit // row)
    return [
        Box((box.offsets[0] + at, *box.offsets[1:]), (min(rows, box.sizes[0] - at), *box.sizes[1:]))
        for at in range(0, box.sizes[0], rows)
    ]
