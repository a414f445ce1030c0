"""Overrides of a configuration on the command line: choices of groups, and single values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mcore_convert.text.names import meant
from train_entry.config.nearest import fields, groups, keys, nearest_key
from train_entry.config.problems import parts

COMMAND_LINE = "command line"
FLAGS = {"--export-hf": "checkpoint.export_hf=end"}  # the settings that have a form with dashes
DEFAULT = object()  # as a value: the default of the schema


@dataclass
class Overrides:
    """Parsed overrides: `selections` are choices of groups, None for none; `values` are single, or several by group."""

    selections: dict[str, Any] = field(default_factory=dict)
    values: list[tuple[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def read_overrides(texts: Sequence[str]) -> Overrides:
    """Parse `parallel=tp2`, `training.steps=20` and `FLAGS`: names, quotes, lists and null as on hydra's command line.

    In a text value, commas and numbers are text too: `data.split=969,30,1` needs no quotes.
    """
    given = Overrides()
    for text in (FLAGS.get(each, each) for each in texts):
        name, equals, raw = text.partition("=")
        name = name.strip().lstrip("+~-")
        known = name in keys() or name in groups()
        if text.startswith("-"):
            line = f"`{text}` is written without dashes: `{name}=...` ({COMMAND_LINE})"
            given.problems.append(line if known else unknown(name, COMMAND_LINE))
        elif equals and _is_text(name) and not raw.startswith(("'", '"', "{")) and raw != "null":
            given.values.append((name, raw))
        else:
            _parse(text, name if known else None, given)
    return given


def _parse(text: str, known: str | None, given: Overrides) -> None:
    """Parse an override by hydra's grammar, and add it to the selections, the values or the problems."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    name, equals, raw = text.partition("=")
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException:
        line = f"`{text}` cannot be read; put texts with spaces, commas, `=` or `~` in quotes of their own"
        line = f"{line if equals else f'`{text}` is not KEY=VALUE'} ({COMMAND_LINE})"
        given.problems.append(line if known else unknown(name.strip().lstrip("+~-"), COMMAND_LINE))
        return
    key, value = override.key_or_group, DEFAULT if override.is_delete() else override.value()
    if override.package is not None:
        given.problems.append(f"`{text}` places a group elsewhere, which a run has no use for ({COMMAND_LINE})")
    elif override.is_sweep_override():
        line = f"`{key}` has several values where a run has one; a list is written `{key}=[{raw}]` ({COMMAND_LINE})"
        given.problems.append(line)
    elif key in groups() and not isinstance(value, dict):
        given.selections[key] = None if value is DEFAULT else value
    else:
        given.values.append((key, value))


def unknown(key: str, where: str) -> str:
    """Return the line for a key that does not exist."""
    place = f" ({where})" if where else ""
    if key in keys():  # written with a dot where YAML has levels
        group, _, name = key.partition(".")
        return f"`{key}` is written `{group}: {{{name}: ...}}` in a file{place}"
    return f"there is no `{key}`{meant(nearest_key(key))}{place}"


def _is_text(key: str) -> bool:
    """Return whether the value of this key is a text or a path, not a list of them."""
    return any(part["type"] == "string" and "enum" not in part for part in parts(fields().get(key, {"type": ""})))
