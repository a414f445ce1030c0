"""A tokenizer as files: how many tokens it has, and which are special, read without transformers or tokenizers."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mcore_convert.errors import UnreadableCheckpoint
from mcore_convert.formats.files.json_file import json_bytes, read_json
from mcore_convert.formats.files.model_folder import TOKENIZER_FILES, carried_files
from mcore_convert.storage.views import open_error

SPECIAL = ("bos_token", "eos_token", "pad_token")
# What the classes of transformers take where no file names a special token.
CLASS_DEFAULTS = {
    "GPT2Tokenizer": {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"},
    "LlamaTokenizer": {"bos_token": "<s>", "eos_token": "</s>"},
}
CHAT_TEMPLATES = ("chat_template.jinja", "chat_template.json")


@dataclass(frozen=True)
class Tokenizer:
    """The files of a tokenizer, by the names that they have in a model's directory, and where it was found.

    `size` is one more than the largest token id: as many rows an embedding must have. `special` are the ids of
    `bos_token_id`, `eos_token_id` and `pad_token_id`, as far as they are known. `texts` are files yet to be written.
    """

    place: str
    files: Mapping[str, Path]
    size: int
    special: Mapping[str, int]
    has_chat_template: bool
    texts: Mapping[str, bytes] = field(default_factory=dict)


def read_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer in a folder; None where there is none.

    Raises:
        UnreadableCheckpoint: its files are damaged.
    """
    files = tuple(carried_files(folder, TOKENIZER_FILES)) if folder.is_dir() else ()
    try:
        return _read(folder, files)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise UnreadableCheckpoint(f"the tokenizer in `{folder}` cannot be read: {error!r}") from error
    except OSError as error:
        raise open_error(Path(error.filename or folder), error) from error


def _read(folder: Path, files: tuple[str, ...]) -> Tokenizer | None:
    ids = _vocabulary(folder, files)
    if ids is None:
        return None
    config = read_json(folder / "tokenizer_config.json") if "tokenizer_config.json" in files else {}
    ids |= _added(folder, files, config)
    named = _named(folder, files, config)
    for token in (*named.values(), *_extra(config)):
        if token not in ids:  # transformers adds it behind all others
            ids[token] = max(ids.values(), default=-1) + 1
    special = {f"{key}_id": ids[token] for key, token in named.items()}
    has_chat_template = bool(config.get("chat_template")) or any(name in files for name in CHAT_TEMPLATES)
    paths = {name: folder / name for name in files}
    return Tokenizer(str(folder), paths, max(ids.values(), default=-1) + 1, special, has_chat_template)


def read_gpt2_bpe(vocabulary: Path, merges: Path) -> Tokenizer | None:
    """The tokenizer of two files as Megatron-LM's `--vocab-file` and `--merge-file` name them; None where one lacks.

    Raises:
        UnreadableCheckpoint: the vocabulary is damaged.
    """
    if not vocabulary.is_file() or not merges.is_file():
        return None
    ids = read_json(vocabulary)
    if not ids or not all(isinstance(number, int) for number in ids.values()):
        raise UnreadableCheckpoint(f"`{vocabulary}` is no vocabulary of a tokenizer")
    special = {f"{key}_id": ids[token] for key, token in CLASS_DEFAULTS["GPT2Tokenizer"].items() if token in ids}
    files = {"vocab.json": vocabulary, "merges.txt": merges}
    texts = {"tokenizer_config.json": json_bytes({"tokenizer_class": "GPT2Tokenizer"})}
    return Tokenizer(str(vocabulary), files, max(ids.values()) + 1, special, False, texts)


def _vocabulary(folder: Path, files: tuple[str, ...]) -> dict[str, int] | None:
    """The ids of all tokens, from the first of the files that holds them, in transformers' order of preference."""
    if "tokenizer.json" in files:
        content = read_json(folder / "tokenizer.json")
        vocab = content["model"]["vocab"]
        ids = dict(vocab) if isinstance(vocab, dict) else {piece[0]: number for number, piece in enumerate(vocab)}
        return ids | {token["content"]: token["id"] for token in content.get("added_tokens") or ()}
    if "vocab.json" in files:
        return {token: int(number) for token, number in read_json(folder / "vocab.json").items()}
    binary = next((name for name in files if name == "tokenizer.model" or name.endswith(".tiktoken")), None)
    if binary is not None:
        raw = (folder / binary).read_bytes()
        return dict(_pieces(raw) if raw[:1] == b"\n" else _ranks(raw))
    if "vocab.txt" in files:
        return {token: number for number, token in enumerate((folder / "vocab.txt").read_text().splitlines())}
    return None


def _pieces(content: bytes) -> Iterator[tuple[str, int]]:
    """The pieces of a SentencePiece model: field 1 of its protobuf message, and field 1 of each."""
    number = 0
    for number_of, value in _fields(memoryview(content)):
        if number_of == 1 and isinstance(value, memoryview):
            piece = next(part for inner, part in _fields(value) if inner == 1)
            yield bytes(piece).decode(errors="replace") if isinstance(piece, memoryview) else "", number
            number += 1


def _fields(message: memoryview) -> Iterator[tuple[int, memoryview | int]]:
    """The fields of a protobuf message: numbers, or bytes where they have a length."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        if tag & 7 == 0:
            value, at = _varint(message, at)
            yield tag >> 3, value
            continue
        size = {1: 8, 5: 4}.get(tag & 7)
        if tag & 7 == 2:
            size, at = _varint(message, at)
        if size is None or at + size > len(message):
            raise ValueError("no SentencePiece model")
        yield tag >> 3, message[at : at + size]
        at += size


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value, shift, at = value | (byte & 0x7F) << shift, shift + 7, at + 1
        if byte < 0x80:
            return value, at


def _ranks(content: bytes) -> Iterator[tuple[str, int]]:
    """The tokens of a tiktoken file: a line `BASE64 RANK` each."""
    for line in content.splitlines():
        token, rank = line.split()
        yield base64.b64decode(token).decode(errors="backslashreplace"), int(rank)


def _added(folder: Path, files: tuple[str, ...], config: Mapping[str, Any]) -> dict[str, int]:
    """The tokens that are added to a vocabulary, with their ids."""
    stored = read_json(folder / "added_tokens.json") if "added_tokens.json" in files else {}
    decoder = config.get("added_tokens_decoder") or {}
    return {
        **{token: int(number) for token, number in stored.items()},
        **{_text(token): int(number) for number, token in decoder.items()},
    }


def _extra(config: Mapping[str, Any]) -> list[str]:
    """Special tokens beside the named ones; transformers 4 and 5 have their own words for them."""
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    return [_text(token) for token in (extra.values() if isinstance(extra, dict) else extra)]


def _named(folder: Path, files: tuple[str, ...], config: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens by what they are for."""
    kind = str(config.get("tokenizer_class", "")).removesuffix("Fast")
    stored = read_json(folder / "special_tokens_map.json") if "special_tokens_map.json" in files else {}
    found = {**CLASS_DEFAULTS.get(kind, {}), **stored, **config}
    return {key: _text(found[key]) for key in SPECIAL if found.get(key)}


def _text(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)
