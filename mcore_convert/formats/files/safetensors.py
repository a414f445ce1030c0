"""safetensors files: reading and writing the header; the data stays where it is.

A file has eight bytes with the header's length, a JSON header, and the tensors, which fill the rest without gaps.
"""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Mapping
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

from mcore_convert.errors import UnreadableCheckpoint
from mcore_convert.formats.files.json_file import parsed
from mcore_convert.formats.files.pickle_records import are_counts
from mcore_convert.spec.shard import Shape
from mcore_convert.storage.sources import handle_of, open_file, size_of
from mcore_convert.storage.views import TensorMeta, View, made, open_error

logger = logging.getLogger(__name__)

DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
MAX_HEADER = 100_000_000  # the limit of the safetensors library


def read(path: Path) -> dict[str, View]:
    """Return the tensors of a file, by name; reads the header only.

    Raises:
        UnreadableCheckpoint: the file is missing, truncated, or its header does not describe its bytes.
    """
    try:
        logger.debug("opened %s for its header", path)
        with open_file(path) as file:
            size = size_of(handle_of(file))
            head = file.read(8)
            if len(head) < 8:
                raise ValueError(f"it ends at byte {len(head)}")
            (length,) = struct.unpack("<Q", head)
            if length > min(MAX_HEADER, size - 8):
                raise ValueError(f"its header should have {length} bytes")
            header = parsed(file.read(length))
            if not isinstance(header, dict):
                raise ValueError("its header is not a JSON object")
    except OSError as error:
        raise open_error(path, error) from error
    except (ValueError, RecursionError) as error:
        reason = "its header is nested too deeply" if isinstance(error, RecursionError) else error
        raise UnreadableCheckpoint(f"`{path}` is damaged, or not a safetensors file: {reason}") from error
    header.pop("__metadata__", None)
    try:
        views, end = _views(path, header, 8 + length)
    except KeyError as error:
        raise UnreadableCheckpoint(f"the header of `{path}` is damaged: a tensor has no {error}") from error
    except (TypeError, ValueError) as error:
        raise UnreadableCheckpoint(f"the header of `{path}` is damaged: {error}") from error
    if end != size:
        raise UnreadableCheckpoint(
            f"`{path}` has {size} bytes, its header describes {end}", hint="the file was not copied completely"
        )
    return views


def _views(path: Path, header: Mapping[str, Mapping[str, Any]], start: int) -> tuple[dict[str, View], int]:
    strange = [name for name, entry in header.items() if not isinstance(entry, dict)]
    if strange:
        raise ValueError(f"`{strange[0]}` is not described")
    numbers = ((*entry["data_offsets"], *entry["shape"]) for entry in header.values())
    if not are_counts(*chain.from_iterable(numbers)):
        bad = (name for name, each in header.items() if not are_counts(*each["data_offsets"], *each["shape"]))
        raise ValueError(f"`{next(bad)}` is not described by integers")
    rows: dict[str, tuple[Any, ...]] = {}
    end = start
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        (low, high), code = entry["data_offsets"], entry["dtype"]
        if code not in DTYPES:
            raise ValueError(f"`{name}` has the dtype `{code}`, which is not supported")
        kind, nbytes = _whole(tuple(entry["shape"]), DTYPES[code])
        if start + low != end or high - low != nbytes:
            raise ValueError(f"`{name}` does not lie where it should")
        rows[name] = (path, end, *kind)
        end = start + high
    return dict(zip(header, made(View, map(rows.__getitem__, header)), strict=True)), end


@lru_cache(maxsize=4096)  # the tensors of a model have few shapes
def _whole(shape: Shape, dtype: str) -> tuple[tuple[Any, ...], int]:
    """Return the fields of a tensor's view except its place, and its size."""
    meta = TensorMeta(shape, dtype)
    return View.of(Path(), 0, meta)[2:], meta.nbytes


def header_bytes(tensors: Mapping[str, TensorMeta]) -> tuple[bytes, dict[str, int]]:
    """Return the header of a file with these tensors in this order, and the offset of each in the file."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    starts = {}
    for name, meta in tensors.items():
        starts[name], end = at, at + meta.nbytes
        entries[name] = {"dtype": CODES[meta.dtype], "shape": meta.shape, "data_offsets": (at, end)}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of eight
    head = struct.pack("<Q", len(text)) + text
    return head, {name: start + len(head) for name, start in starts.items()}
