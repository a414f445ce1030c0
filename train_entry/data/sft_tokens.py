"""Examples for fine-tuning as tokens: made once from a file of JSON lines, cached beside the run, and mapped."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mcore_convert.errors import DataError
from train_entry.data.chunks import JsonLines
from train_entry.data.sft_text import Example, Marked, example_of
from train_entry.data.sources import Reading, chunks, source_of
from train_entry.data.tokenizer import Tokenizer

VERSION = 1  # of the cache: changes with the result of this file for a record
Tokens = npt.NDArray[np.int32]
HINT = 'an example is {"prompt": ..., "completion": ...} or {"messages": [{"role": ..., "content": ...}, ...]}'


@dataclass(frozen=True)
class Examples:
    """The examples of a file, one after the other in `tokens`; example i ends at `ends[i]`.

    A token that is to be learned is its id, any other `~id`: -1 for 0, -2 for 1. `empty` examples of `records` had
    nothing to learn and are left out.
    """

    path: str
    tokens: Tokens
    ends: npt.NDArray[np.int64]
    records: int
    empty: int

    def lengths(self) -> npt.NDArray[np.int64]:
        """Return the tokens of each example."""
        return np.diff(self.ends, prepend=0)


def examples_of(path: str, tokenizer: Tokenizer, cache: Path) -> Examples:
    """Return the examples of a file, tokenized unless they are in `cache`.

    Raises:
        DataError: the file is missing, some lines are not examples, or nothing in it is to be learned.
    """
    source = source_of(path, Reading(kind="jsonl"))
    if source.kind != "jsonl":
        raise DataError(f"`{path}` is no file of JSON lines", hint=HINT)
    kept = cache / f"sft-{_key(path, tokenizer)}.json"
    if not kept.is_file():
        _keep(chunks(source, Reading(kind="jsonl")), tokenizer, kept)
    counts = json.loads(kept.read_text())
    if not counts["tokens"]:
        raise DataError(f"`{path}` has no example with anything to learn", hint=HINT)
    tokens = np.memmap(kept.with_suffix(".tokens"), np.int32, "r", shape=(counts["tokens"],))
    ends = np.memmap(kept.with_suffix(".ends"), np.int64, "r", shape=(counts["examples"],))
    return Examples(path, tokens, ends, counts["records"], counts["records"] - counts["examples"])


def _key(path: str, tokenizer: Tokenizer) -> str:
    """Return the name of cached tokens: it changes with the file, the tokenizer and its chat template."""
    file = Path(path).absolute()
    state = file.stat()
    facts = [VERSION, str(file), state.st_size, state.st_mtime_ns, tokenizer.unique_identifiers]
    facts += [tokenizer.hf.chat_template, _begin_of(tokenizer)]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _keep(pieces: Iterable[Any], tokenizer: Tokenizer, kept: Path) -> None:
    """Write tokens and ends, and last the counts, without which the others are not used."""
    records = examples = end = 0
    kept.parent.mkdir(parents=True, exist_ok=True)
    partial = {suffix: kept.with_suffix(f"{suffix}.{os.getpid()}.partial") for suffix in (".tokens", ".ends", ".json")}
    try:
        with partial[".tokens"].open("wb") as tokens, partial[".ends"].open("wb") as ends:
            for chunk in pieces:
                for example in _tokenized(chunk, tokenizer):
                    records += 1
                    if np.any(example[1:] >= 0):  # the first token is not predicted
                        examples, end = examples + 1, end + len(example)
                        tokens.write(example.data)
                        ends.write(np.int64(end).tobytes())
        partial[".json"].write_text(json.dumps({"records": records, "examples": examples, "tokens": end}))
        for suffix, file in partial.items():
            file.replace(kept.with_suffix(suffix))
    finally:
        for file in partial.values():
            file.unlink(missing_ok=True)


def _tokenized(chunk: JsonLines, tokenizer: Tokenizer) -> Iterator[Tokens]:
    """Yield each example of a chunk, in the form of `Examples`."""
    examples = list(chunk.records(lambda record: example_of(record, tokenizer), HINT))
    texts = ["".join(part for part, _ in each.parts) for each in examples if isinstance(each, Example)]
    encoded = iter(_encoded(texts, tokenizer))
    begin = _begin_of(tokenizer)
    for each in examples:
        if isinstance(each, Marked):
            ids, learned = np.array(each.ids, np.int32), np.array(each.learned, bool)
        else:
            ids, learned = _aligned(each, *next(encoded), tokenizer)
            if each.closed:
                ids, learned = _closed(ids, learned, begin, tokenizer.eod)
        yield np.where(learned, ids, ~ids).astype(np.int32)


def _encoded(texts: list[str], tokenizer: Tokenizer) -> Iterator[tuple[list[int], list[tuple[int, int]] | None]]:
    """Yield the ids of each text, and the offsets of each token in it, which some tokenizers do not have."""
    if not texts:
        return
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # explicit, so that later forks do not warn
    fast = tokenizer.hf.is_fast
    encoded = tokenizer.hf(
        texts, add_special_tokens=False, return_offsets_mapping=fast, truncation=False, verbose=False
    )
    yield from zip(encoded["input_ids"], encoded["offset_mapping"] if fast else [None] * len(texts), strict=True)


def _aligned(
    example: Example, ids: list[int], offsets: list[tuple[int, int]] | None, tokenizer: Tokenizer
) -> tuple[Tokens, npt.NDArray[np.bool_]]:
    """Return the ids of an example, and whether each is to be learned.

    The text is tokenized as a whole. If a token would extend from one part into the next, the parts are tokenized one
    by one instead: a prompt is complete before the first token of its answer is drawn.
    """
    bounds = np.cumsum([len(part) for part, _ in example.parts])
    if offsets is not None and ids:
        place = np.array(offsets, np.int64)
        # some tokenizers count no blanks into a token: it then begins at the end of the previous one
        starts = np.minimum(place[:, 0], np.concatenate([[0], place[:-1, 1]]))
        part = np.searchsorted(bounds, starts, side="right")
        if np.all(place[:, 1] <= bounds[np.minimum(part, len(bounds) - 1)]):
            return np.array(ids, np.int32), np.array([learned for _, learned in example.parts] + [False])[part]
    pieces = [np.array(each, np.int32) for each, _ in _encoded([text for text, _ in example.parts], tokenizer)]
    learned = [np.full(len(piece), learn) for piece, (_, learn) in zip(pieces, example.parts, strict=True)]
    return np.concatenate(pieces), np.concatenate(learned)


def _closed(
    ids: Tokens, learned: npt.NDArray[np.bool_], begin: Sequence[int], eod: int | None
) -> tuple[Tokens, npt.NDArray[np.bool_]]:
    """Return an example with the tokens that the tokenizer puts before a text, and an end of text, which is learned."""
    end = [eod] if eod is not None and not (len(ids) and ids[-1] == eod) else []
    return (
        np.concatenate([np.array(begin, np.int32), ids, np.array(end, np.int32)]),
        np.concatenate([np.zeros(len(begin), bool), learned, np.ones(len(end), bool)]),
    )


def _begin_of(tokenizer: Tokenizer) -> list[int]:
    """Return the tokens that the tokenizer puts before a text, such as a BOS."""
    bare: list[int] = tokenizer.hf("a", add_special_tokens=False)["input_ids"]
    full: list[int] = tokenizer.hf("a")["input_ids"]
    for length in range(len(full) - len(bare) + 1):
        if full[length : length + len(bare)] == bare:
            return full[:length]
    return []
