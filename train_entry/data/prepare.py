"""`prepare`: texts as Megatron's `.bin`/`.idx`, in constant memory, the same bytes for any number of processes."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mcore_convert.errors import DataError, UnwritableTarget
from mcore_convert.storage.deferral import Deferral
from mcore_convert.storage.disk import sync
from mcore_convert.storage.locking import locked
from mcore_convert.storage.threads import WORKERS
from train_entry.data.bin_idx import SUFFIXES, PairWriter, dtype_for
from train_entry.data.chunks import Chunk
from train_entry.data.encode import Encoding, encode_all
from train_entry.data.sidecar import Sidecar
from train_entry.data.sources import Reading, Source, chunks, source_of
from train_entry.data.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class Progress:
    """Progress of the preparation: bytes of the sources that were read, and their total; and the result so far."""

    read: int
    total: int
    documents: int
    tokens: int


@dataclass(frozen=True)
class Prepared:
    """Result of a preparation: for each key the prefix of its pair, and its sidecar; and the time without loading
    the tokenizer."""

    pairs: dict[str, Sidecar]
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {"pairs": {prefix: asdict(pair) for prefix, pair in self.pairs.items()}, "seconds": self.seconds}


def prepare(
    inputs: Sequence[str],
    prefix: str,
    *,
    tokenizer: str,
    reading: Reading | None = None,
    workers: int | None = None,
    append_eod: bool = True,
    special_tokens: bool = True,
    revision: str | None = None,
    overwrite: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> Prepared:
    """Tokenize texts into `PREFIX_KEY_document.bin` and `.idx`, for each key; they appear when they are complete.

    Args:
        inputs: files, `datasets:NAME[:SPLIT]`, or directories written by `Dataset.save_to_disk`.
        tokenizer: directory or Hub id; `revision` is a branch, tag or commit there.
        reading: the fields or columns with text, and the separator of documents in plain text.
        workers: processes that tokenize; one per core unless given.
        append_eod: end each document with the tokenizer's end of text, without which documents run into each other.
        special_tokens: put those tokens around a text that the tokenizer itself puts there, such as a BOS: models see
            them
            in use.
        progress: called from time to time.

    Raises:
        DataError: an input, a line of it, or the tokenizer is invalid.
        UnwritableTarget: the files exist and may not be replaced, are being written, or there is no room.
    """
    reading = reading or Reading()
    sources = [source_of(name, reading) for name in inputs]
    prefixes = [f"{prefix}_{key}_document" for key in reading.keys]
    _check_free(prefixes, overwrite=overwrite)
    loaded = load_tokenizer(tokenizer, revision)
    if append_eod and loaded.eod is None:
        raise DataError(f"the tokenizer `{tokenizer}` has no end of text to append", hint="pass --no-append-eod")
    start = time.monotonic()
    encoding = Encoding(loaded, reading.keys, append_eod, special_tokens)
    with _written(prefixes, dtype_for(loaded.vocab_size), overwrite=overwrite) as writers:
        counts = _write(sources, reading, encoding, workers or WORKERS, writers, progress)
        pairs = {
            writer.prefix: _sidecar(writer, loaded, append_eod, sources, *count)
            for writer, count in zip(writers, counts, strict=True)
        }
        if not any(pair.documents for pair in pairs.values()):
            raise DataError("there is not one document with text in the input", items=inputs)
        for writer, pair in zip(writers, pairs.values(), strict=True):
            writer.complete()
            pair.write(writer.partial(".json"))
        publish_all(writers)
    return Prepared(pairs, time.monotonic() - start)


def publish_all(writers: Sequence[PairWriter]) -> None:
    """Rename all pairs, once their content is on the disk. Signals wait until then.

    Raises:
        OSError: the file system reports an error.
    """
    with Deferral():
        for writer in writers:
            sync(writer.partial(".json"))
        for writer in writers:
            writer.publish()
        for folder in {Path(writer.prefix).parent for writer in writers}:
            sync(folder)


def _write(
    sources: Sequence[Source],
    reading: Reading,
    encoding: Encoding,
    workers: int,
    writers: Sequence[PairWriter],
    progress: Callable[[Progress], None] | None,
) -> list[tuple[int, int]]:
    """Write all documents, and return the number of empty ones and the bytes of text for each key."""
    empty, text_bytes = [0] * len(writers), [0] * len(writers)
    total = sum(source.nbytes for source in sources)
    with contextlib.closing(encode_all(_in_turn(sources, reading), encoding, workers)) as encoded:
        for chunk, keys in encoded:
            for number, (writer, each) in enumerate(zip(writers, keys, strict=True)):
                writer.add(each.ids, each.lengths)
                empty[number] += each.empty
                text_bytes[number] += each.text_bytes
            if progress is not None:
                progress(Progress(chunk.read, total, writers[0].sequences, sum(writer.tokens for writer in writers)))
    return list(zip(empty, text_bytes, strict=True))


def _in_turn(sources: Sequence[Source], reading: Reading) -> Iterator[Chunk]:
    """Yield the chunks of all sources; `read` is the running total over them."""
    before = 0
    for source in sources:
        for chunk in chunks(source, reading):
            yield replace(chunk, read=before + chunk.read)
        before += source.nbytes


def _sidecar(
    writer: PairWriter, tokenizer: Tokenizer, append_eod: bool, sources: Sequence[Source], empty: int, text_bytes: int
) -> Sidecar:
    return Sidecar(
        tokenizer=tokenizer.name,
        fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        eod=tokenizer.eod,
        append_eod=append_eod,
        dtype=writer.dtype,
        documents=writer.sequences,
        empty=empty,
        tokens=writer.tokens,
        text_bytes=text_bytes,
        sources=tuple(source.name for source in sources),
    )


def _check_free(prefixes: Sequence[str], *, overwrite: bool) -> None:
    taken = [f"{prefix}{suffix}" for prefix in prefixes for suffix in SUFFIXES if os.path.lexists(f"{prefix}{suffix}")]
    if taken and not overwrite:
        raise UnwritableTarget("the data exist", items=taken, hint="choose another prefix, or pass --overwrite")


@contextlib.contextmanager
def _written(prefixes: Sequence[str], dtype: str, *, overwrite: bool) -> Iterator[list[PairWriter]]:
    """Scope of the pairs to write, locked against other processes. Unpublished ones are removed at the end."""
    folder = Path(prefixes[0]).parent
    with Deferral() as signals, contextlib.ExitStack() as scope:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            writers: list[PairWriter] = []
            for prefix in prefixes:
                lock = scope.enter_context(locked(Path(f"{prefix}.lock"), Path(prefix)))
                lock.record()
                writers.append(PairWriter(prefix, dtype, lock.identity))
                scope.callback(writers[-1].discard)
            _check_free(prefixes, overwrite=overwrite)  # again: another process may have finished
            signals.admit()
            yield writers
        except OSError as error:
            raise UnwritableTarget(f"`{prefixes[0]}` cannot be written: {error.strerror or error}") from error
        finally:
            signals.hold()
