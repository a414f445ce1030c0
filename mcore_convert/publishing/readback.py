"""Proof of written tensors, read again: the source's weights bit for bit, and their checksum.

The checksum is the SHA-256 of a text with a line `NAME DTYPE SHAPE SHA256` for each tensor, sorted, where SHA256 is
that of the tensor's elements in row-major order, under its Hugging Face name and as the source stores it. So it is the
same for the same weights in any format and at any layout.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping, Sequence

import numpy as np

from mcore_convert.conversion.reopening import FAULTY_HINT
from mcore_convert.errors import UnwritableTarget
from mcore_convert.publishing.hf_tensors import HfTensor
from mcore_convert.spec.shard import Box
from mcore_convert.storage.codecs import Blocks
from mcore_convert.storage.elements import Bytes, Files
from mcore_convert.storage.progress import Meter
from mcore_convert.storage.threads import in_threads
from mcore_convert.storage.views import View

BLOCK = 2 * 2**20  # bytes that are hashed and compared at once, while they are in the cache


def read_back(tensors: Sequence[HfTensor], written: Mapping[str, View], meter: Meter) -> str:
    """Prove that each tensor was written correctly, in the dtype or codes of the target; return the source's checksum.

    Raises:
        UnwritableTarget: a tensor is missing or differs.
    """
    stop = threading.Event()

    def line_of(tensor: HfTensor) -> str:
        digest = hashlib.sha256()
        view = written.get(tensor.name)
        if view is None or view.shape != tensor.meta.shape:
            raise UnwritableTarget(f"`{tensor.name}` is not what was written", hint=FAULTY_HINT)
        for box in tensor.blocks(BLOCK):
            if stop.is_set():
                break
            block = tensor.read(files, box)
            digest.update(block.data)
            if not _is_written(tensor, block, view, box, files):
                raise UnwritableTarget(
                    f"`{tensor.name}` in `{view.path.name}` is not what was written",
                    hint=FAULTY_HINT,
                )
            meter.add(block.nbytes)
        return f"{tensor.name} {tensor.meta.dtype} {list(tensor.meta.shape)} {digest.hexdigest()}\n"

    lines: list[str] = []
    with Files() as files:
        in_threads(line_of, tensors, lines.append, stop=stop)
    return hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()


def _is_written(tensor: HfTensor, block: Bytes, view: View, box: Box, files: Files) -> bool:
    """Return whether a box of a tensor was written correctly, cast or quantised; `block` is the box in the source."""
    part = view.narrow(box)
    if isinstance(view.coded, Blocks):
        return bool(view.coded.may_hold(files, part, tensor.read(files, box, "float32").view(np.float32)).all())
    rounded = block if view.dtype == tensor.meta.dtype else tensor.read(files, box, view.dtype)
    return np.array_equal(rounded, files.read(part))
