"""Mutations of files, by damage, haste and malice: bytes, numbers, words and whole files, by a seed alone."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"

Files = dict[str, bytes]
Ranges = dict[str, list[tuple[int, int]]]

NUMBERS = (0, 1, 2, 3, 127, 128, 255, 256, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)
WORDS = (
    b"", b"0", b"-1", b"1e999", b"NaN", b"null", b"true", b"[]", b"{}", b'""', b"[[]]", b'{"a":1}', b"1" * 5000,
    b'"\\ud800"', b'"{layer}"', b'"{0}"', b'"../../etc/passwd"', b'"/etc/passwd"', b'"a\\u0000b"', b"9" * 19,
    b"\xff\xfe", b"\xed\xa0\x80", b"[" * 2000, b'{"a":' * 2000, b"F32", b"I32", b"BF16", b"F16", b"F8_E4M3",
)  # fmt: skip
TOKEN = re.compile(rb"-?\d+(?:\.\d+)?|\"[^\"\\]{0,60}\"|[A-Za-z_][\w.]{2,60}")


def mutated(data: bytes, seeds: Sequence[bytes], rng: random.Random, kept: Sequence[tuple[int, int]] = ()) -> bytes:
    """Return the bytes after one to four changes; those in the ranges of `kept` are moved perhaps,
    and not written over.
    """
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        data = _changed(data, seeds, rng, kept)
    return data


def _changed(data: bytes, seeds: Sequence[bytes], rng: random.Random, kept: Sequence[tuple[int, int]]) -> bytes:
    size = len(data)
    at = rng.randrange(size + 1)
    for _ in range(50):
        if not any(low <= at < high for low, high in kept):
            break
        at = rng.randrange(size + 1)
    else:
        return data
    room = min([size, *(low for low, _ in kept if low > at)]) - at  # what may be written over
    kind = rng.randrange(11)
    if kind == 0 and room:  # a bit
        return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
    if kind == 1 and room:  # a byte
        return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
    if kind == 2:  # a number
        width = rng.choice((1, 2, 4, 8))
        if room >= width:
            number: int = rng.choice(NUMBERS) % 256**width
            return data[:at] + number.to_bytes(width, rng.choice(("little", "big"))) + data[at + width :]
    if kind in (3, 4, 5):  # a token of text
        tokens = [
            each
            for each in TOKEN.finditer(data)
            if not kept or not any(a < each.end() and each.start() < b for a, b in kept)
        ]
        if tokens:
            token = rng.choice(tokens)
            new = rng.choice(WORDS) if kind == 3 else rng.choice(tokens).group()
            if kind == 5 and token.group().lstrip(b"-").isdigit():
                new = b"%d" % (int(token.group()[:18]) + rng.choice((-1, 1, 8, 64)))
            return data[: token.start()] + new + data[token.end() :]
    if kind == 6:  # cut off
        return data[:at]
    if kind == 7:  # taken out
        return data[:at] + data[at + min(room, rng.choice((1, 2, 4, 8, 64))) :]
    if kind == 8:  # twice
        return data[: at + min(room, rng.choice((1, 8, 64)))] + data[at:]
    if kind == 9:  # put in
        return data[:at] + rng.choice(WORDS) + data[at:]
    other = rng.choice(seeds)
    return data[:at] + other[rng.randrange(len(other) + 1) :][: rng.choice((8, 64, 4096))] + data[at:]


def mutated_files(files: Files, kept: Ranges, rng: random.Random) -> tuple[Files, str]:
    """Return a checkpoint after a change, and what it was. Tensor data are not written over: no format could tell."""
    files = dict(files)
    names = sorted(files)
    name = rng.choice(names)
    kind = rng.randrange(20)
    if kind == 0:
        del files[name]
        return files, f"{name} is missing"
    if kind == 1:
        files[name] = b""
        return files, f"{name} is empty"
    other = rng.choice(names)
    if kind == 2 and not name.endswith((".pt", ".distcp", ".safetensors", ".bin")) and "/0." not in name:
        files[name] = files[other]
        return files, f"{name} is {other}"
    if kind == 3:
        at = rng.randrange(max([0, *(high for _, high in kept.get(name, ()))]), len(files[name]) + 1)
        files[name] = files[name][:at] + bytes(len(files[name]) - at)
        return files, f"{name} is zero from byte {at}"
    files[name] = mutated(files[name], [files[other]], rng, kept.get(name, ()))
    return files, f"{name} is changed"
