"""Kinds of `torch.distributed.checkpoint` directories, distinguished by the names of their tensors.

Megatron's `dist_checkpointing` writes a `metadata.json` (Megatron Core, `dist_checkpointing/core.py`). For others, the
names are plain text in `.metadata`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import Enum
from functools import lru_cache
from pathlib import Path

from mcore_convert.formats.files import dcp
from mcore_convert.spec.gpt import EMBEDDING, FINAL_NORMS
from mcore_convert.storage.sources import open_file
from mcore_convert.storage.views import open_error

BACKEND_FILE = "metadata.json"
STEP, OVERLAP = 2**20, 2**10  # bytes per read, and the longest name across two reads


class Kind(Enum):
    """Source of the tensors' names: Megatron Core, Megatron-FSDP's wrappers, or Hugging Face."""

    MEGATRON = "megatron"
    FSDP_DTENSOR = "fsdp_dtensor"
    HUGGING_FACE = "hugging face"


SIGNS = {
    Kind.FSDP_DTENSOR: re.compile(rb"\bmodel\d*\.module\.[\w.]*" + re.escape(EMBEDDING.encode())),
    Kind.MEGATRON: re.compile(b"|".join(re.escape(name.encode()) for name in (EMBEDDING, *FINAL_NORMS))),
    Kind.HUGGING_FACE: re.compile(rb"\b(embed_tokens|lm_head|wte|embed_in|word_embeddings)\.weight"),
}


def kind_of(path: Path) -> Kind:
    """Return the kind of a directory by its tensors' names; by default Megatron's.

    Raises:
        UnreadableCheckpoint: `.metadata` cannot be read.
    """
    file = path / dcp.METADATA
    if (path / BACKEND_FILE).is_file():
        return Kind.MEGATRON
    try:
        stat = file.stat()
        return _kind_in(file, stat.st_mtime_ns, stat.st_size)
    except OSError as error:
        raise open_error(file, error) from error


@lru_cache(maxsize=16)
def _kind_in(file: Path, modified: int, size: int) -> Kind:
    """Return the first kind, in the order of SIGNS, whose pattern occurs in the file.
    `modified` and `size` keep the cache from returning results of an older file.
    """
    left = set(SIGNS)
    before = b""
    with open_file(file) as opened:
        while left and (step := opened.read(STEP)):
            content = before + step
            left -= {kind for kind in left if SIGNS[kind].search(content)}
            before = content[-OVERLAP:]
    return next((kind for kind in SIGNS if kind not in left), Kind.MEGATRON)


def directory_of(detect: Callable[[Path], bool]) -> Callable[[Path], Path | None]:
    """Return a function from a file to the directory of its checkpoint; None for any other path."""
    return lambda path: path.parent if path.is_file() and detect(path.parent) else None
