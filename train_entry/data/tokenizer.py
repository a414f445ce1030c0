"""The tokenizer of a run or of prepared data: that of `transformers`, with attributes for Megatron's data sets."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_convert.checkpoints.download import unreachable
from mcore_convert.errors import DataError
from mcore_convert.publishing.companions import FORMS
from mcore_convert.publishing.tokenizer import folder_of, holds_tokenizer, is_bare_bpe
from mcore_convert.storage.paths import near_miss

if TYPE_CHECKING:
    from mcore_convert.checkpoints.identify import Model
    from train_entry.config.schema import Config

# Packages that transformers needs to read a file in another program's form, beside those that this project installs.
READERS = ("sentencepiece", "tiktoken")


@dataclass(frozen=True)
class Tokenizer:
    """A Hugging Face tokenizer (`hf`), with the attributes that Megatron's data sets read.

    It has no `pad`, on purpose: where that is also the end of text, as in many tokenizers, Megatron Core
    may exclude every end of text from the loss.

    `vocab_size` counts every id that it can produce; `eod` ends a document (`eos_token`), None if it has none.
    `fingerprint` is equal whenever ids mean the same tokens, added ones aside, on any machine.
    """

    name: str
    hf: Any = field(repr=False, compare=False)
    vocab_size: int
    eod: int | None
    fingerprint: str

    @property
    def unique_identifiers(self) -> dict[str, Any]:
        """Fields that Megatron Core puts into the names of its cached indices."""
        return {"fingerprint": self.fingerprint, "vocab_size": self.vocab_size, "eod": self.eod}


def tokenizer_of(config: Config, origin: Model | None = None) -> Tokenizer | None:
    """Return the tokenizer of a run: the one it names (`data.tokenizer`), else that of the checkpoint it starts from.

    Args:
        origin: the checkpoint, whose `folder` is a Hugging Face directory, or the one that a conversion left beside
            a Megatron checkpoint.

    Returns None if there is none. Mock data need none, so the checkpoint's is not read for them.

    Raises:
        DataError: it cannot be read.
    """
    if config.data.tokenizer is not None:
        return load_tokenizer(config.data.tokenizer)
    folder = origin.folder if origin is not None else None
    if (config.data.kind == "mock" and not config.data.dataset) or folder is None:
        return None
    return load_tokenizer(str(folder)) if holds_tokenizer(folder) else None


def load_tokenizer(name: str, revision: str | None = None) -> Tokenizer:
    """Read a tokenizer from a directory, from one of its files, or by its Hub id.

    Raises:
        DataError: there is none, or it cannot be read.
    """
    from transformers import AutoTokenizer

    path = folder_of(Path(name))
    if path.is_dir() and not holds_tokenizer(path):
        raise DataError(f"`{name}` has no tokenizer", hint=FORMS)
    meant = near_miss(path) if revision is None and not path.exists() else None
    if not path.is_dir() and (path.is_absolute() or name.startswith(".") or name.count("/") > 1 or meant):
        hint = f"did you mean `{meant}`?" if meant else "name the directory of a tokenizer, or a Hub id"
        raise DataError(f"`{name}` does not exist", hint=hint)
    options = {"tokenizer_type": "gpt2"} if path.is_dir() and is_bare_bpe(path) else {}
    silent = None if path.exists() else unreachable()
    try:
        offline = silent is not None
        hf = AutoTokenizer.from_pretrained(str(path), revision=revision or "main", local_files_only=offline, **options)
    except Exception as error:  # transformers lets errors of its many readers through
        if silent is not None:
            raise DataError(
                f"`{name}` is no directory, was not downloaded before, and the Hub cannot be reached: {silent}"
            ) from error
        lines = [line.strip() for line in (str(error).strip() or type(error).__name__).splitlines() if line.strip()]
        raise DataError(
            f"`{name}` is no tokenizer that transformers can read", items=lines, hint=_absent_readers(path)
        ) from error
    vocabulary: Mapping[str, int] = hf.get_vocab()
    return Tokenizer(
        name=name,
        hf=hf,
        vocab_size=max(len(hf), max(vocabulary.values(), default=-1) + 1),  # ids may have gaps
        eod=hf.eos_token_id,
        fingerprint=_fingerprint(vocabulary, hf.vocab_size),
    )


def _absent_readers(folder: Path) -> str | None:
    """Return what to install for a folder whose tokenizer is in another program's form; None if nothing is missing."""
    absent = [package for package in READERS if find_spec(package) is None]
    foreign = folder.is_dir() and any([*folder.glob("*.model"), *folder.glob("*.tiktoken")])
    return f"a file of this form needs its reader: `pip install {' '.join(absent)}`" if foreign and absent else None


def _fingerprint(vocabulary: Mapping[str, int], size: int) -> str:
    """Return a hash of the tokens with ids below `size`. Tokens added after them do not change the ids of a text."""
    tokens = sorted((number, token) for token, number in vocabulary.items() if number < size)
    lines = "".join(f"{number}\t{token}\0" for number, token in tokens)
    return hashlib.sha256(lines.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def check_fits(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Prove that a model has a row for each token.

    Args:
        vocab_size: the model's vocabulary, without padding.

    Raises:
        DataError: the tokenizer is larger.
    """
    if tokenizer.vocab_size > vocab_size:
        raise DataError(
            f"the tokenizer `{tokenizer.name}` has {tokenizer.vocab_size} tokens, the model's vocabulary {vocab_size}",
            hint="choose the model's own tokenizer (`data.tokenizer`); a new model has the vocabulary of its tokenizer "
            "unless `model.vocab_size` is given",
        )
