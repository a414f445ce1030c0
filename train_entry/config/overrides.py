"""What the command line says of a configuration: which choices of groups, and which single values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_origin

from train_entry.config.files import problems_of_choice
from train_entry.config.nearest import groups, keys, nearest_key
from train_entry.config.schema import Config

COMMAND_LINE = "command line"
FLAGS = {"--export-hf": "checkpoint.export_hf=end"}  # what may be said with dashes
FLOW_OPTION = "training.flow."  # before the name of an option of a flow
DEFAULT = object()  # as a value: what the schema has


@dataclass
class Overrides:
    """`selections` are choices of groups, None for none; `values` are single ones by their full dotted keys."""

    selections: dict[str, str | None] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def read_overrides(texts: Sequence[str], folder: Path) -> Overrides:
    """Read `parallel=tp2`, `training.steps=20` and `FLAGS`: names, quotes, lists and null as in hydra's command line.

    Where a value is text, commas and numbers are text too: `data.split=969,30,1` needs no quotes.

    Args:
        folder: of the run's file, which may have choices of its own.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser, found = OverridesParser.create(), Overrides()
    for text in (FLAGS.get(each, each) for each in texts):
        name, equals, raw = text.partition("=")
        name = name.strip().lstrip("+~-")
        if text.startswith("-"):
            known = name in keys() or name in groups()
            line = f"`{text}` is written without dashes: `{name}=...` ({COMMAND_LINE})"
            found.problems.append(line if known else unknown(name, COMMAND_LINE))
            continue
        if equals and _is_text(name) and not raw.startswith(("'", '"', "{")) and raw != "null":
            found.values[name] = raw
            continue
        try:
            override = parser.parse_override(text)
        except HydraException:
            found.problems.append(_unreadable(text, name))
            continue
        if override.package is not None:
            found.problems.append(f"`{text}` places a group elsewhere, which a run has no use for ({COMMAND_LINE})")
        elif override.is_sweep_override():
            found.problems.append(
                f"`{name}` has several values where a run has one; a list is written `{name}=[{raw}]` ({COMMAND_LINE})"
            )
        else:
            _sort(override.key_or_group, DEFAULT if override.is_delete() else override.value(), folder, found)
    return found


def _sort(key: str, value: Any, folder: Path, found: Overrides) -> None:
    """Add one to the selections or to the values, or to the problems."""
    if key in groups() and isinstance(value, dict):
        for name, inner in value.items():
            _sort(f"{key}.{name}", inner, folder, found)
    elif key in groups():
        choice = None if value in (None, DEFAULT) else str(value)
        problems = [] if choice is None else problems_of_choice(key, choice, folder)
        found.problems += [f"{problem} ({COMMAND_LINE})" for problem in problems]
        if not problems:
            found.selections[key] = choice
    elif key in keys() or key.startswith(FLOW_OPTION):  # what options there are, the flow's own model says
        found.values[key] = value
    else:
        found.problems.append(unknown(key, COMMAND_LINE))


def unknown(key: str, where: str) -> str:
    """The line for a key that does not exist."""
    if key in keys():  # spelled with its dot where YAML has levels
        group, _, name = key.partition(".")
        return f"`{key}` is written `{group}: {{{name}: ...}}` in a file" + (f" ({where})" if where else "")
    near = nearest_key(key)
    return f"there is no `{key}`" + (f"; did you mean `{near}`?" if near else "") + (f" ({where})" if where else "")


def _unreadable(text: str, name: str) -> str:
    if name not in keys() and name not in groups():
        return unknown(name, COMMAND_LINE)
    if "=" not in text:
        return f"`{text}` is not KEY=VALUE ({COMMAND_LINE})"
    return f"`{text}` cannot be read; put texts with spaces, commas, `=` or `~` in quotes of their own ({COMMAND_LINE})"


def _is_text(key: str) -> bool:
    """Whether the value of this key is text, or a path; a list of them is not."""
    if key not in keys():
        return False
    group, _, name = key.rpartition(".")
    model = type(getattr(Config(), group)) if group else Config
    annotation = model.model_fields[name].annotation
    return get_origin(annotation) is not tuple and bool({str, Path} & {annotation, *get_args(annotation)})
