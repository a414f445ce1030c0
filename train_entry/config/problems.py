"""What is wrong with a value of the configuration: the key, what it has, and what it may have."""

from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from mcore_convert.spec.config.mapping import shown
from train_entry.config.nearest import nearest
from train_entry.config.schema import Config

# A type in words: of one value, and of several.
WORDS: dict[Any, tuple[str, str]] = {
    bool: ("true or false", "true or false"),
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    str: ("text", "text"),
    Path: ("a path", "paths"),
}
# A bound in words, by its attribute in pydantic's metadata.
BOUNDS = {"ge": "from", "gt": "above", "le": "up to", "lt": "below"}


def problems_of(error: ValidationError) -> Iterator[tuple[str, str]]:
    """The full dotted key of each bad value, and the line that says what it is and what it may be.

    A key that does not exist has an empty line.
    """
    for each in error.errors(include_url=False, include_context=False):
        location, value = each["loc"], each["input"]
        names = [str(part) for part in location if isinstance(part, str)]
        key = ".".join(names)
        if each["type"] == "extra_forbidden":
            yield key, ""
            continue
        spelled = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).removeprefix(".")
        yield (
            key,
            f"`{spelled}` = {shown(value)} is not {_allowed(names, inside=spelled != key)}" + _meant(names, value),
        )


def describe(field: FieldInfo) -> str:
    """What a field may have: `a whole number from 1, or null`."""
    return _in_words(field.annotation, tuple(field.metadata), many=False)


def _allowed(names: list[str], *, inside: bool) -> str:
    """What the field of these names may have; `inside`: an element of its list."""
    if len(names) == 1 and names[0] in Config.model_fields and names[0] != "run_dir":
        return f"a group of keys; a choice of it is selected under `defaults:`, or as `{names[0]}=CHOICE`"
    field = _field(names)
    if not inside:
        return describe(field)
    return _in_words(next(part for part in get_args(field.annotation) if part is not Ellipsis), (), many=False)


def _meant(names: list[str], value: Any) -> str:
    """The nearest one of a few words."""
    if len(names) != 2 or not isinstance(value, str):
        return ""
    known = [each for part in _parts(_field(names).annotation) for each in get_args(part) if isinstance(each, str)]
    near = nearest(value, known)
    return f"; did you mean `{near}`?" if near else ""


def _field(names: list[str]) -> FieldInfo:
    model = type(getattr(Config(), names[0])) if len(names) > 1 else Config
    found: FieldInfo = model.model_fields[names[-1]]
    return found


def _parts(annotation: Any) -> list[Any]:
    """The types of a union, or the type itself; without None."""
    union = get_origin(annotation) in (Union, types.UnionType)
    return [part for part in get_args(annotation) if part is not types.NoneType] if union else [annotation]


def _in_words(annotation: Any, metadata: tuple[Any, ...], *, many: bool) -> str:
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        return _in_words(inner, (*metadata, *more), many=many)
    parts = _parts(annotation)
    if parts != [annotation]:
        null = ", or null" if types.NoneType in get_args(annotation) else ""
        return " or ".join(_in_words(part, metadata, many=many) for part in parts) + null
    if get_origin(annotation) is dict:
        return "{class: module:Class, OPTION: VALUE}"
    if get_origin(annotation) is Literal:
        return f"one of {', '.join(map(str, get_args(annotation)))}"
    if get_origin(annotation) is tuple:
        return f"a list of {_in_words(get_args(annotation)[0], (), many=True)}: write [a, b]"
    bounds = [
        f"from {bound + 1}" if annotation is int and name == "gt" else f"{word} {bound:g}"
        for each in metadata
        for name, word in BOUNDS.items()
        if (bound := getattr(each, name, None)) is not None
    ]
    return " ".join([WORDS[annotation][many], *([" and ".join(bounds)] if bounds else [])])
