"""The file beside prepared data, `PREFIX.json`: the tokenizer that made them, and their counts."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mcore_convert.errors import DataError
from mcore_convert.formats.files.json_file import parsed
from mcore_convert.storage.sources import Limit, content_of

VERSION = 1


@dataclass(frozen=True)
class Sidecar:
    """Tokenizer of a pair, and counts. `fingerprint` is the `Tokenizer`'s; `empty` documents were left out."""

    tokenizer: str
    fingerprint: str
    vocab_size: int
    eod: int | None
    append_eod: bool
    dtype: str
    documents: int
    empty: int
    tokens: int
    text_bytes: int
    sources: tuple[str, ...]

    def write(self, path: Path) -> None:
        """Write it as JSON.

        Raises:
            OSError: the file system reports an error.
        """
        path.write_text(json.dumps({"version": VERSION, **asdict(self)}, indent=2, ensure_ascii=False) + "\n")


def sidecar_of(prefix: str) -> Sidecar | None:
    """Read the sidecar of a pair; None if it has none, as data that Megatron-LM has prepared.

    Raises:
        DataError: the file is not one that this command writes.
    """
    path = Path(f"{prefix}.json")
    try:
        fields: Any = parsed(content_of(path, Limit.JSON))
        if fields.pop("version") == VERSION:
            return Sidecar(**{**fields, "sources": tuple(fields["sources"])})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError):
        pass
    raise DataError(
        f"`{path}` does not say what the data beside it are, as `mcore-convert data prepare` would have written it",
        hint="remove it: data train without it too",
    )
