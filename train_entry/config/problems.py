"""Problems with a value of the configuration: the key, its value, and the allowed values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from mcore_convert.spec.config.mapping import shown
from mcore_convert.text.names import meant
from train_entry.config.nearest import fields, groups, nearest

# Words for a type or format of JSON schema: for one value, and for several.
WORDS = {
    "boolean": ("true or false", "true or false"),
    "integer": ("a whole number", "whole numbers"),
    "number": ("a number", "numbers"),
    "string": ("text", "text"),
    "path": ("a path", "paths"),
}
BOUNDS = {"minimum": "from", "exclusiveMinimum": "above", "maximum": "up to", "exclusiveMaximum": "below"}


def problems_of(error: ValidationError) -> Iterator[tuple[str, str]]:
    """Yield the full dotted key of each invalid value, and a line with the value and the allowed ones."""
    for each in error.errors(include_url=False, include_context=False):
        depth = 2 if each["loc"][0] in groups() else 1  # the rest is an index, or a type of a union
        key, indices = ".".join(map(str, each["loc"][:depth])), [n for n in each["loc"][depth:] if isinstance(n, int)]
        field, value = fields()[key], each["input"]
        known = [word for part in parts(field) for word in part.get("enum", ())]
        near = nearest(value, known) if isinstance(value, str) else None
        spelled = key + "".join(f"[{index}]" for index in indices)
        yield key, f"`{spelled}` = {shown(value)} is not {_in_words(field['items'] if indices else field)}{meant(near)}"


def parts(field: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the alternative JSON schemas of a field, without null."""
    return [part for part in field.get("anyOf", [field]) if part.get("type") != "null"]


def _in_words(field: dict[str, Any], *, many: bool = False) -> str:
    if "anyOf" in field:
        null = ", or null" if parts(field) != field["anyOf"] else ""
        return " or ".join(_in_words(part, many=many) for part in parts(field)) + null
    if "enum" in field:
        return f"one of {', '.join(field['enum'])}"
    if field["type"] == "object":
        return "{class: module:Class, OPTION: VALUE}"
    if field["type"] == "array":
        return f"a list of {_in_words(field['items'], many=True)}: write [a, b]"
    bounds = [
        f"from {field[name] + 1}"
        if (field["type"], name) == ("integer", "exclusiveMinimum")
        else f"{word} {field[name]:g}"
        for name, word in BOUNDS.items()
        if name in field
    ]
    return " ".join([WORDS[field.get("format", field["type"])][many], *([" and ".join(bounds)] if bounds else [])])
