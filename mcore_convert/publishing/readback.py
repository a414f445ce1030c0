"""The proof of written tensors, read again: the source's weights bit for bit, and the checksum of these.

The checksum is the SHA-256 of a text with a line `NAME DTYPE SHAPE SHA256` for each tensor, sorted, where SHA256 is
that of the tensor's elements in row-major order, under its Hugging Face name and as the source stores it. So it is the
same for the same weights in any format and at any layout.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from mcore_convert.conversion.reopening import FAULTY_HINT
from mcore_convert.errors import UnwritableTarget
from mcore_convert.publishing.hf_tensors import HfTensor
from mcore_convert.storage.elements import WORKERS, Files
from mcore_convert.storage.progress import Meter
from mcore_convert.storage.views import View

BLOCK = 2 * 2**20  # bytes that are hashed and compared at once, while they are in the cache


def read_back(tensors: Sequence[HfTensor], written: Mapping[str, View], meter: Meter) -> str:
    """Prove that each tensor was written, cast to the dtype it was written in; returns the checksum of the source's.

    Raises:
        UnwritableTarget: a tensor that is not there as it should be.
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
            rounded = block if view.dtype == tensor.meta.dtype else tensor.read(files, box, view.dtype)
            if not np.array_equal(rounded, files.read(view.narrow(box))):
                raise UnwritableTarget(
                    f"`{tensor.name}` in `{view.path.name}` is not what was written",
                    hint=FAULTY_HINT,
                )
            meter.add(block.nbytes)
        return f"{tensor.name} {tensor.meta.dtype} {list(tensor.meta.shape)} {digest.hexdigest()}\n"

    with Files() as files, ThreadPoolExecutor(WORKERS) as pool:
        try:
            lines = list(pool.map(line_of, tensors))
        except BaseException:
            stop.set()  # what waits ends at once
            raise
    return hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()
