"""The values of options: the choices, and the parsing of other values."""

from __future__ import annotations

import json
import re
from enum import StrEnum
from pathlib import Path
from typing import Any

import typer

SIZES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


class Implementation(StrEnum):
    """Layer specs whose names the format `torch` can have."""

    local = "local"
    transformer_engine = "transformer_engine"


class Dtype(StrEnum):
    """Dtypes of weights."""

    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"


class Quantisation(StrEnum):
    """Forms that weights are quantised to."""

    fp8_block = "fp8-block"
    int4 = "int4"


def size(text: str) -> int:
    """Return a number of bytes from `5GB`, `500MB`, `2GiB` or a plain number."""
    matched = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if matched is None or matched[2].upper() not in SIZES or not float(matched[1]):
        raise typer.BadParameter(f"`{text}` is not a size; write 5GB, 500MB or 2GiB")
    return int(float(matched[1]) * SIZES[matched[2].upper()])


def arguments(texts: list[str] | None) -> dict[str, Any]:
    """Return Megatron arguments from `NAME=VALUE`; a value is parsed as JSON if it is JSON."""
    values: dict[str, Any] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals:
            raise typer.BadParameter(f"`{text}` is not NAME=VALUE", param_hint="--arg")
        name = name.strip().removeprefix("--").replace("-", "_")
        try:
            values[name] = json.loads(value)
        except ValueError:
            values[name] = value
    return values


def page_name(path: Path | None) -> Path | None:
    """Check the name of a page: a mistyped name must not replace a file of another kind."""
    if path is not None and path.suffix.lower() not in (".html", ".htm"):
        raise typer.BadParameter(f"`{path}` is no name of a page; call it `{path.name}.html`")
    return path
