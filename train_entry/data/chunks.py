"""Pieces of a source, each with many documents, as they travel to the processes that tokenize: cut, not yet parsed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from mcore_convert.errors import DataError, ranged

T = TypeVar("T")

Document = Sequence[str | None]  # the text of each key; None where there is none
SHOWN = 60  # characters of a bad line


@dataclass(frozen=True)
class JsonLines:
    """Whole lines of JSON. `line`: the number of the first, from 1; `read`: bytes of the source up to their end."""

    file: str
    line: int
    read: int
    data: bytes

    def documents(self, keys: Sequence[str]) -> Iterator[Document]:
        """Return a document of each line that is not blank.

        Raises:
            DataError: lines are bad; all that are bad are named.
        """
        hint = "`--json-keys` names the fields that hold text; correct or remove these lines"
        return self.records(lambda record: texts_of(record, keys), hint)

    def records(self, read: Callable[[Any], T], hint: str) -> Iterator[T]:
        """Yield what `read` makes of each line that is not blank; a ValueError of it is what is wrong with the line.

        Raises:
            DataError: lines are bad; all that are bad are named, those with the same fault together.
        """
        lines: dict[str, list[int]] = {}  # by what is wrong with them
        shown: dict[str, str] = {}
        # not `splitlines`: within a string, JSON may have other ends of line than this one
        for number, line in enumerate(self.data.split(b"\n"), start=self.line):
            if not line.strip():
                continue
            try:
                yield read(json.loads(_decoded(line)))
            except (ValueError, RecursionError) as error:
                lines.setdefault(_reason(error), []).append(number)
                shown.setdefault(_reason(error), _shown(line))
        problems = []
        for reason, (first, *others) in lines.items():
            more = f" (and {'line' if len(others) == 1 else 'lines'} {ranged(others)})" if others else ""
            problems.append(f"{self.file}:{first}: {reason}: {shown[reason]}{more}")
        if problems:
            raise DataError("lines of the input are not what they should be", items=problems, hint=hint)


def texts_of(record: Any, keys: Sequence[str]) -> Document:
    """Return the texts of a record.

    Raises:
        ValueError: it is no object, lacks a key, or has something else than text there.
    """
    if not isinstance(record, dict):
        raise ValueError(f"a JSON {type(record).__name__}, not an object")
    missing = [key for key in keys if key not in record]
    if missing:
        raise ValueError(f"no `{missing[0]}` among its keys ({', '.join(map(str, record)) or 'none'})")
    for key in keys:
        if record[key] is not None and not isinstance(record[key], str):
            raise ValueError(f"`{key}` is a {type(record[key]).__name__}, not text")
        if record[key] is not None:
            record[key].encode()  # half of a surrogate pair is no text
    return [record[key] for key in keys]


@dataclass(frozen=True)
class Plain:
    """Text, cut behind a separator; without one, a single document. `line` and `read` as above."""

    file: str
    line: int
    read: int
    data: bytes
    separator: bytes

    def documents(self, keys: Sequence[str]) -> Iterator[Document]:
        """Yield what stands between separators, without the ends of lines around it.

        Raises:
            DataError: it is no UTF-8.
        """
        try:
            text = _decoded(self.data)
        except UnicodeDecodeError as error:
            line = self.line + self.data.count(b"\n", 0, error.start)
            raise DataError(f"{self.file}:{line}: {_reason(error)}", hint="convert the file to UTF-8") from error
        parts = text.split(self.separator.decode()) if self.separator else [text]
        if self.separator and not parts[-1].strip():  # what follows the last separator is a document only if it is text
            parts.pop()
        for part in parts:
            yield [part.strip("\r\n")]


@dataclass(frozen=True)
class Rows:
    """Rows of a table, by columns. `read`: bytes of the source up to their end, about."""

    read: int
    columns: Mapping[str, Sequence[str | None]]

    def documents(self, keys: Sequence[str]) -> Iterator[Document]:
        """Yield a document of each row."""
        yield from zip(*(self.columns[key] for key in keys), strict=True)


Chunk = JsonLines | Plain | Rows


def _decoded(data: bytes) -> str:
    return data.decode("utf-8")


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"no JSON ({error.msg} at column {error.colno})"
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.object[error.start]:#04x} is no UTF-8"
    if isinstance(error, UnicodeEncodeError):
        return "half of a surrogate pair, which is no text"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def _shown(line: bytes) -> str:
    text = line.decode("utf-8", "replace").strip()
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
