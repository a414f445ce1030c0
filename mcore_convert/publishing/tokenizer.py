"""A tokenizer as files: its number of tokens, and its special tokens, read without transformers or tokenizers."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from mcore_convert.errors import UnreadableCheckpoint
from mcore_convert.formats.files.json_file import json_bytes, read_json
from mcore_convert.formats.files.model_folder import CONFIG, TOKENIZER_FILES, carried_files
from mcore_convert.storage.sources import Limit, content_of, open_file
from mcore_convert.storage.views import open_error

SPECIAL = ("bos_token", "eos_token", "pad_token")
VARINT = 64  # bits of a number in a protobuf message
# Special tokens that the classes of transformers use where no file names them.
CLASS_DEFAULTS = {
    "GPT2Tokenizer": dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>"),
    "LlamaTokenizer": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
}
# Files with all tokens, of which one is enough, in transformers' order of preference.
VOCABULARIES = ("tokenizer.json", "vocab.json", "tokenizer.model", "*.tiktoken", "vocab.txt")
CHAT_TEMPLATES = ("chat_template.jinja", "chat_template.json")


@dataclass(frozen=True)
class Tokenizer:
    """Files of a tokenizer, by the names that they have in a model's directory, and the place where they were read.

    `size` is one more than the largest token id: the number of rows that an embedding needs. `special` are the ids of
    `bos_token_id`, `eos_token_id` and `pad_token_id`, as far as known. `texts` are files yet to be written.
    """

    place: str
    files: Mapping[str, Path]
    size: int
    special: Mapping[str, int]
    has_chat_template: bool
    texts: Mapping[str, bytes] = field(default_factory=dict)


def read_tokenizer(place: Path) -> Tokenizer | None:
    """Return the tokenizer in a folder, or that of one of its files; None if there is none.

    Raises:
        UnreadableCheckpoint: its files are damaged.
    """
    folder = folder_of(place)
    if folder.is_dir():
        return _read(place, {name: folder / name for name in carried_files(folder, TOKENIZER_FILES)})
    return _read(place, {"tokenizer.model": place} if place.is_file() else {})


def read_gpt2_bpe(vocabulary: Path, merges: Path) -> Tokenizer | None:
    """Return the tokenizer of Megatron-LM's `--vocab-file` and `--merge-file`; None if one of them is missing.

    Raises:
        UnreadableCheckpoint: the vocabulary is damaged.
    """
    if not vocabulary.is_file() or not merges.is_file():
        return None
    return _read(vocabulary, {"vocab.json": vocabulary, "merges.txt": merges})


def folder_of(place: Path) -> Path:
    """Return the folder of a tokenizer, given the folder or one of its files."""
    is_part = any(fnmatch(place.name, pattern) for pattern in TOKENIZER_FILES)
    return place.parent if is_part and place.is_file() else place


def holds_tokenizer(folder: Path) -> bool:
    """Return whether a folder has a file that may be a tokenizer; its content is not read."""
    return any(any(folder.glob(pattern)) for pattern in (*VOCABULARIES, "tokenizer_config.json"))


def is_bare_bpe(folder: Path) -> bool:
    """Return whether a folder has the two files of GPT-2's tokenizer, and none that states its class."""
    return _class_of({name: folder / name for name in carried_files(folder, TOKENIZER_FILES)}) == "GPT2Tokenizer"


def _read(place: Path, files: Mapping[str, Path]) -> Tokenizer | None:
    """Return the tokenizer of these files, given by their names in a model's folder."""
    try:
        return _tokenizer(place, files)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise UnreadableCheckpoint(f"the tokenizer in `{place}` cannot be read: {error!r}") from error
    except OSError as error:
        raise open_error(Path(error.filename or place), error) from error


def _tokenizer(place: Path, files: Mapping[str, Path]) -> Tokenizer | None:
    ids = _vocabulary(files)
    if ids is None:
        return None
    config, texts = _json(files, "tokenizer_config.json"), {}
    kind = _class_of(files)
    if kind is not None:
        config = {"tokenizer_class": kind}
        # a token that is not in the vocabulary would be added to it
        config |= {key: token if token in ids else None for key, token in CLASS_DEFAULTS[kind].items()}
        texts = {"tokenizer_config.json": json_bytes(config)}
    ids |= _added(files, config)
    named = _named(files, config)
    for token in (*named.values(), *_extra(config)):
        if token not in ids:  # transformers appends it
            ids[token] = max(ids.values(), default=-1) + 1
    special = {f"{key}_id": ids[token] for key, token in named.items()}
    has_chat_template = bool(config.get("chat_template")) or any(name in files for name in CHAT_TEMPLATES)
    return Tokenizer(str(place), files, max(ids.values(), default=-1) + 1, special, has_chat_template, texts)


def _class_of(files: Mapping[str, Path]) -> str | None:
    """Return the class of transformers for files that do not state it; None if they do, or if it is unknown.

    The configuration of a model beside them states it, too.
    """
    beside = {file.parent / CONFIG for file in files.values()}
    if "tokenizer_config.json" in files or "tokenizer.json" in files or any(file.is_file() for file in beside):
        return None
    if "vocab.json" in files and "merges.txt" in files:
        return "GPT2Tokenizer"
    return "LlamaTokenizer" if "tokenizer.model" in files and _is_sentencepiece(files["tokenizer.model"]) else None


def _is_sentencepiece(file: Path) -> bool:
    """Return whether a file is a SentencePiece model, a message whose first field is a piece; tiktoken's are text."""
    with open_file(file) as opened:
        return opened.read(1) == b"\n"


def _json(files: Mapping[str, Path], name: str) -> dict[str, Any]:
    return read_json(files[name], Limit.TOKENIZER) if name in files else {}


def _vocabulary(files: Mapping[str, Path]) -> dict[str, int] | None:
    """Return the ids of all tokens, from the first file with all tokens, in transformers' order of preference."""
    name = next((name for pattern in VOCABULARIES for name in files if fnmatch(name, pattern)), None)
    if name is None:
        return None
    file = files[name]
    if name == "tokenizer.json":
        content = read_json(file, Limit.TOKENIZER)
        vocab = content["model"]["vocab"]
        ids = dict(vocab) if isinstance(vocab, dict) else {piece[0]: number for number, piece in enumerate(vocab)}
        return ids | {token["content"]: token["id"] for token in content.get("added_tokens") or ()}
    if name == "vocab.json":
        return {token: int(number) for token, number in read_json(file, Limit.TOKENIZER).items()}
    if name == "vocab.txt":
        return {token: number for number, token in enumerate(content_of(file, Limit.VOCABULARY).decode().splitlines())}
    raw = content_of(file, Limit.VOCABULARY)
    return dict(_pieces(raw) if _is_sentencepiece(file) else _ranks(raw))


def _pieces(content: bytes) -> Iterator[tuple[str, int]]:
    """Yield the pieces of a SentencePiece model: field 1 of its protobuf message, and field 1 of each."""
    number = 0
    for number_of, value in _fields(memoryview(content)):
        if number_of == 1 and isinstance(value, memoryview):
            piece = next((part for inner, part in _fields(value) if inner == 1), None)
            if piece is None:
                raise ValueError("a piece of it has no text")
            yield bytes(piece).decode(errors="replace") if isinstance(piece, memoryview) else "", number
            number += 1


def _fields(message: memoryview) -> Iterator[tuple[int, memoryview | int]]:
    """Yield the fields of a protobuf message: numbers, or bytes if they have a length."""
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
        if shift >= VARINT:
            raise ValueError("no SentencePiece model")
        value, shift, at = value | (byte & 0x7F) << shift, shift + 7, at + 1
        if byte < 0x80:
            return value, at


def _ranks(content: bytes) -> Iterator[tuple[str, int]]:
    """Yield the tokens of a tiktoken file, which has a line `BASE64 RANK` per token."""
    for line in content.splitlines():
        token, rank = line.split()
        yield base64.b64decode(token).decode(errors="backslashreplace"), int(rank)


def _added(files: Mapping[str, Path], config: Mapping[str, Any]) -> dict[str, int]:
    """Return the tokens that are added to a vocabulary, with their ids."""
    decoder = config.get("added_tokens_decoder") or {}
    return {
        **{token: int(number) for token, number in _json(files, "added_tokens.json").items()},
        **{_text(token): int(number) for number, token in decoder.items()},
    }


def _extra(config: Mapping[str, Any]) -> list[str]:
    """Return the special tokens without a role of their own; transformers 4 and 5 store them under different keys."""
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    return [_text(token) for token in (extra.values() if isinstance(extra, dict) else extra)]


def _named(files: Mapping[str, Path], config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens by role."""
    kind = str(config.get("tokenizer_class", "")).removesuffix("Fast")
    values = {**CLASS_DEFAULTS.get(kind, {}), **_json(files, "special_tokens_map.json"), **config}
    return {key: _text(values[key]) for key in SPECIAL if values.get(key)}


def _text(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)
