"""Documents as tokens, tokenized in parallel by several processes; the results are in the order of the source."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import chain
from multiprocessing import get_context
from typing import Any

import numpy as np
import numpy.typing as npt

from mcore_convert.errors import DataError
from train_entry.data.bin_idx import dtype_for
from train_entry.data.chunks import Chunk
from train_entry.data.tokenizer import Tokenizer

AHEAD = 2  # chunks per process that are read and not yet written
PR_SET_PDEATHSIG = 1  # of prctl(2): the signal that a process gets when its parent ends


@dataclass(frozen=True)
class Encoding:
    """Settings of tokenization. `special_tokens`: those that the tokenizer itself puts around a text."""

    tokenizer: Tokenizer
    keys: tuple[str, ...]
    append_eod: bool
    special_tokens: bool


@dataclass(frozen=True)
class Encoded:
    """Documents of a chunk, for one key: all their ids, and the number of ids of each. Empty ones are left out."""

    ids: npt.NDArray[Any]
    lengths: npt.NDArray[np.int32]
    empty: int
    text_bytes: int


def encode(chunk: Chunk, encoding: Encoding) -> list[Encoded]:
    """Tokenize a chunk, for each key.

    Raises:
        DataError: the chunk is invalid.
    """
    columns: list[list[str | None]] = [[] for _ in encoding.keys]
    for document in chunk.documents(encoding.keys):
        for column, text in zip(columns, document, strict=True):
            column.append(text)
    return [_encode(column, encoding) for column in columns]


def _encode(texts: Sequence[str | None], encoding: Encoding) -> Encoded:
    tokenizer = encoding.tokenizer
    full = [text for text in texts if text and not text.isspace()]
    rows = [row for row in _ids_of(full, encoding) if row]
    if encoding.append_eod:
        for row in rows:
            if row[-1] != tokenizer.eod:  # some tokenizers append it themselves
                row.append(tokenizer.eod)
    lengths = np.fromiter(map(len, rows), np.int32, len(rows))
    ids = np.fromiter(chain.from_iterable(rows), dtype_for(tokenizer.vocab_size), int(lengths.sum(dtype=np.int64)))
    return Encoded(ids, lengths, len(texts) - len(rows), sum(len(text.encode()) for text in full))


def _ids_of(texts: list[str], encoding: Encoding) -> list[list[Any]]:
    """Return the ids of each text, by the Rust library if the tokenizer uses it, which computes nothing else."""
    if not texts:
        return []
    hf = encoding.tokenizer.hf
    if not hf.is_fast:
        ids: list[list[Any]] = hf(texts, add_special_tokens=encoding.special_tokens, verbose=False)["input_ids"]
        return ids
    backend = hf.backend_tokenizer
    return [each.ids for each in backend.encode_batch_fast(texts, add_special_tokens=encoding.special_tokens)]


def encode_all(chunks: Iterable[Chunk], encoding: Encoding, workers: int) -> Generator[tuple[Chunk, list[Encoded]]]:
    """Yield every chunk with its tokens, in order; `workers` processes tokenize, and end with this generator.

    Raises:
        DataError: a chunk is invalid, or a process was killed.
    """
    if encoding.tokenizer.hf.is_fast:  # the saved truncation and padding are for inputs of models
        encoding.tokenizer.hf.backend_tokenizer.no_truncation()
        encoding.tokenizer.hf.backend_tokenizer.no_padding()
    with _one_thread_each():
        # forked, so that the tokenizer and the libraries are loaded already
        pool = ProcessPoolExecutor(workers, get_context("fork"), _begin, (encoding, os.getpid()))
        try:
            waiting: deque[tuple[Chunk, Future[list[Encoded]]]] = deque()
            for each in chunks:
                waiting.append((each, pool.submit(_encode_here, each)))
                if len(waiting) >= AHEAD * workers:
                    yield _result(waiting)
            while waiting:
                yield _result(waiting)
        except BrokenProcessPool as error:
            raise DataError(
                "a process that tokenized was killed", hint="if memory ran out, choose fewer: --workers N"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


def _result(waiting: deque[tuple[Chunk, Future[list[Encoded]]]]) -> tuple[Chunk, list[Encoded]]:
    chunk, future = waiting.popleft()
    return chunk, future.result()


@contextlib.contextmanager
def _one_thread_each() -> Iterator[None]:
    """Scope in which the Rust library starts no threads: there are processes instead."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


_encoding: Encoding | None = None  # of this process, if it tokenizes


def _begin(encoding: Encoding, parent: int) -> None:
    """Initialise a process: it ends with its parent, which alone handles the terminal's signals."""
    global _encoding
    _encoding = encoding
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    libc: Callable[..., int] | None = getattr(ctypes.CDLL(None), "prctl", None)
    if libc is not None:
        libc(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


def _encode_here(chunk: Chunk) -> list[Encoded]:
    assert _encoding is not None
    return encode(chunk, _encoding)
