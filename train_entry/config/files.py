"""The YAML files of configurations: the directories of runs and choices, and their content with line numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import yaml

from mcore_convert.errors import ConfigError
from mcore_convert.storage.paths import near_miss
from mcore_convert.storage.sources import Limit, content_of
from mcore_convert.text.names import meant
from train_entry.config.nearest import nearest

CONFIGS = Path(__file__).parents[1] / "configs"  # ready runs, and a directory of choices for each group
MAX_PARTS = 100_000  # of a file, with its aliases expanded
ENDING = ".yaml"
DEFAULTS = "defaults"
OWN = "_self_"


@dataclass(frozen=True)
class File:
    """YAML file of a run, or of a choice of a group.

    `defaults` are its selections and inherited runs, `values` its own values; `lines` has full dotted keys, and
    `defaults.0` for the first entry of the defaults list.
    """

    path: Path
    values: Mapping[str, Any]
    defaults: tuple[Any, ...]
    lines: Mapping[str, int]

    def where(self, key: str) -> str:
        """Return the place of a key: `my.yaml, line 7`."""
        return f"{self.path}, line {self.lines[key]}" if key in self.lines else str(self.path)


def names_in(folder: Path) -> list[str]:
    """Return the names of the YAML files of a directory."""
    return sorted(path.stem for path in folder.glob(f"*{ENDING}"))


def ready_runs() -> list[str]:
    """Return the runs that are part of this package."""
    return names_in(CONFIGS)


def choices(group: str, folder: Path = CONFIGS) -> list[str]:
    """Return the choices of a group: those of this package, and those beside the user's file."""
    return sorted({*names_in(CONFIGS / group), *names_in(folder / group)})


def title(path: Path) -> str:
    """Return the title of a file of this package: its first line."""
    with path.open(encoding="utf-8") as file:
        return file.readline().removeprefix("#").strip()


def locate(source: str) -> Path:
    """Return the YAML file of a run, from its path, the directory of an earlier run, or the name of a ready run.

    Raises:
        ConfigError: there is none; names the nearest ready run.
    """
    if source in ready_runs():
        return CONFIGS / f"{source}{ENDING}"
    path = Path(source).expanduser()
    if path.is_dir() and (path / f"config{ENDING}").is_file():
        return path / f"config{ENDING}"
    if path.is_file() and path.suffix != ENDING:
        raise ConfigError(f"`{source}` is not a YAML file", hint=f"its name must end in `{ENDING}`")
    if path.is_file():
        return path
    kind = "file" if path.suffix == ENDING or len(path.parts) > 1 else "ready run"
    raise ConfigError(
        f"there is no {kind} `{source}`{meant(near_miss(path) or nearest(source, ready_runs()))}",
        hint=f"name a YAML file, or one of the ready runs: {', '.join(ready_runs())}",
    )


def read(path: Path) -> File:
    """Read the YAML file of a run or of a choice.

    Raises:
        ConfigError: it cannot be read, is not YAML, or has the wrong structure.
    """
    try:
        values, lines = _parsed(content_of(path, Limit.SETTINGS).decode())
    except yaml.MarkedYAMLError as error:
        raise syntax_error(error, path) from error
    except RecursionError as error:
        raise ConfigError(f"`{path}` is nested too deeply") from error
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"`{path}` cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"`{path}` is not the configuration of a run", hint="its keys are groups: `training: ...`")
    defaults = values.get(DEFAULTS) or []
    if not isinstance(defaults, list):
        raise ConfigError(f"`{DEFAULTS}` in `{path}` is not a list", hint=f"write `{DEFAULTS}: [tiny-gpt2, {OWN}]`")
    return File(path, {str(key): value for key, value in values.items() if key != DEFAULTS}, tuple(defaults), lines)


@cache
def _parsed(text: str) -> tuple[Any, dict[str, int]]:
    """Return the content of a YAML file, and the line of each key. The result is cached: do not modify it."""
    from omegaconf import OmegaConf

    node = yaml.compose(text, yaml.SafeLoader)
    _check_size(node)
    return OmegaConf.to_container(OmegaConf.load(StringIO(text))), dict(_lines(node, "")) if node else {}


def _check_size(node: yaml.Node | None) -> None:
    """Prove that a document with its aliases expanded is not too large: an alias may contain others.

    Raises:
        ValueError: it is too large.
    """
    pending, parts = [node], 0
    while pending:
        part = pending.pop()
        parts += 1
        if parts > MAX_PARTS:
            raise ValueError(f"with its aliases it has more than {MAX_PARTS:,} parts")
        if isinstance(part, yaml.SequenceNode):
            pending += part.value
        elif isinstance(part, yaml.MappingNode):
            pending += [each for pair in part.value for each in pair]


def syntax_error(error: yaml.MarkedYAMLError, path: Path) -> ConfigError:
    """Return the error for a file that is not YAML: the file, the line, and the problem there."""
    mark = error.problem_mark or error.context_mark
    name = mark.name if mark and not mark.name.startswith("<") else str(path)
    line = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
    return ConfigError(f"`{name}`{line} is not YAML: {error.problem or error}")


def _lines(node: yaml.Node, prefix: str) -> Iterator[tuple[str, int]]:
    """Yield the line of each key, and of each entry of a list, counted from 1."""
    if isinstance(node, yaml.MappingNode):
        pairs = [(str(key.value), key, value) for key, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        pairs = [(str(index), entry, entry) for index, entry in enumerate(node.value)]
    else:
        return
    for name, key, value in pairs:
        yield prefix + name, key.start_mark.line + 1
        yield from _lines(value, f"{prefix}{name}.")
