"""The YAML files of configurations: where runs and choices of groups are, and what a run's own file says where."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mcore_convert.errors import ConfigError
from mcore_convert.storage.paths import near_miss
from mcore_convert.storage.sources import Limit, content_of
from train_entry.config.nearest import groups, nearest

CONFIGS = Path(__file__).parents[1] / "configs"  # ready runs, and in a directory for each group its choices
MAX_PARTS = 100_000  # of a file, with what aliases stand for
ENDING = ".yaml"  # the only one that hydra finds
DEFAULTS = "defaults"
OWN = "_self_"


@dataclass(frozen=True)
class RunFile:
    """The YAML file of a run: what it selects and inherits, its own values, and the line of each key.

    `lines` has full dotted keys, and `defaults.0` for the first entry of the defaults list.
    """

    path: Path
    values: Mapping[str, Any]
    defaults: tuple[Any, ...]
    lines: Mapping[str, int]

    def where(self, key: str) -> str:
        """`my.yaml, line 7` of a key that stands in this file; empty for another."""
        return f"{self.path}, line {self.lines[key]}" if key in self.lines else ""


def names_in(folder: Path) -> list[str]:
    """The names of the YAML files of a directory."""
    return sorted(path.stem for path in folder.glob(f"*{ENDING}"))


def ready_runs() -> list[str]:
    """The runs that come with this package."""
    return names_in(CONFIGS)


def choices(group: str, folder: Path = CONFIGS) -> list[str]:
    """The choices of a group: those that come with this package, and those beside the user's file."""
    return sorted({*names_in(CONFIGS / group), *names_in(folder / group)})


def title(path: Path) -> str:
    """What a file of this package says of itself in its first line."""
    with path.open(encoding="utf-8") as file:
        return file.readline().removeprefix("#").strip()


def locate(source: str) -> Path:
    """The YAML file of a run, from its path, from the directory that the run left, or from the name of a ready run.

    Raises:
        ConfigError: there is none; the nearest ready run is named.
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
    meant = near_miss(path)
    near = str(meant) if meant else nearest(source, ready_runs())
    kind = "file" if path.suffix == ENDING or len(path.parts) > 1 else "ready run"
    raise ConfigError(
        f"there is no {kind} `{source}`" + (f"; did you mean `{near}`?" if near else ""),
        hint=f"name a YAML file, or one of the ready runs: {', '.join(ready_runs())}",
    )


def read(path: Path) -> RunFile:
    """Read the YAML file of a run.

    Raises:
        ConfigError: it cannot be read, is no YAML, or is not what a run's file is.
    """
    from omegaconf import OmegaConf

    try:
        text = content_of(path, Limit.SETTINGS).decode()
        node = yaml.compose(text, yaml.SafeLoader)
        _check_size(node)
        loaded = OmegaConf.load(io.StringIO(text))
    except yaml.MarkedYAMLError as error:
        raise syntax_error(error, path) from error
    except RecursionError as error:
        raise ConfigError(f"`{path}` is nested too deeply") from error
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"`{path}` cannot be read: {getattr(error, 'strerror', None) or error}") from error
    values = OmegaConf.to_container(loaded)
    if not isinstance(values, dict):
        raise ConfigError(f"`{path}` is not the configuration of a run", hint="its keys are groups: `training: ...`")
    defaults = values.pop(DEFAULTS, None) or []
    if not isinstance(defaults, list):
        raise ConfigError(f"`{DEFAULTS}` in `{path}` is not a list", hint=f"write `{DEFAULTS}: [tiny-gpt2, {OWN}]`")
    lines = {} if node is None else dict(_lines(node, ""))
    return RunFile(path, {str(key): value for key, value in values.items()}, tuple(defaults), lines)


def _check_size(node: yaml.Node | None) -> None:
    """Prove that a document is no larger than it looks: an alias stands for a whole part of it, which may hold others.

    Raises:
        ValueError: it is not so.
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
    """A YAML file that is none: the file, the line, and what is wrong there."""
    mark = error.problem_mark or error.context_mark
    name = mark.name if mark and not mark.name.startswith("<") else str(path)
    line = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
    return ConfigError(f"`{name}`{line} is not YAML: {error.problem or error}")


def _lines(node: yaml.Node, prefix: str) -> Iterator[tuple[str, int]]:
    """The line of each key, and of each entry of a list, counted from 1."""
    if isinstance(node, yaml.MappingNode):
        pairs = [(str(key.value), key, value) for key, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        pairs = [(str(index), entry, entry) for index, entry in enumerate(node.value)]
    else:
        return
    for name, key, value in pairs:
        yield prefix + name, key.start_mark.line + 1
        yield from _lines(value, f"{prefix}{name}.")


def problems_of_defaults(run: RunFile, seen: tuple[Path, ...] = ()) -> list[str]:
    """What the defaults list of a run's file names that does not exist, a line each; also in the files it inherits."""
    problems = []
    if run.path in seen:
        return [f"`{run.path}` inherits itself"]
    for index, entry in enumerate(run.defaults):
        where = run.where(f"{DEFAULTS}.{index}")
        for group, choice in _wanted(entry):
            if group is None:
                problems += _problems_of_inherited(run, choice, where, seen)
            else:
                problems += [f"{line} ({where})" for line in problems_of_choice(group, choice, run.path.parent)]
        if not _wanted(entry) and entry not in (OWN, None):
            problems.append(f"`{entry}` in `{DEFAULTS}` selects nothing ({where})")
    return problems


def problems_of_choice(group: str, choice: Any, folder: Path) -> list[str]:
    """Whether a group, and this choice of it, exist; if not, a line that says so and what is nearest."""
    if group not in groups():
        near = nearest(group, groups())
        return [f"there is no group `{group}`" + (f"; did you mean `{near}`?" if near else "")]
    known = choices(group, folder)
    if choice in known:
        return []
    near = nearest(str(choice), known)
    meant = f"did you mean `{group}={near}`? " if near else ""
    return [f"`{group}` has no choice `{choice}`; {meant}it has {', '.join(known)}"]


def _problems_of_inherited(run: RunFile, name: str, where: str, seen: tuple[Path, ...]) -> list[str]:
    here = run.path.parent / f"{name}{ENDING}"
    if here.is_file() and here.parent.resolve() != CONFIGS.resolve():
        return problems_of_defaults(read(here), (*seen, run.path))
    if name in ready_runs():
        return []
    near = nearest(name, {*ready_runs(), *names_in(run.path.parent)} - {run.path.stem})
    return [f"there is no run `{name}` to inherit" + (f"; did you mean `{near}`?" if near else "") + f" ({where})"]


def _wanted(entry: Any) -> list[tuple[str | None, Any]]:
    """The group and choice of an entry of a defaults list; a run that is inherited has no group."""
    if isinstance(entry, str) and entry != OWN:
        group, _, name = entry.lstrip("/").rpartition("/")
        return [(group or None, name)]
    if not isinstance(entry, Mapping) or len(entry) != 1:
        return []
    key, chosen = next(iter(entry.items()))
    group = str(key).split()[-1].lstrip("/").partition("@")[0]
    return [(group, each) for each in (chosen if isinstance(chosen, list) else [chosen]) if each is not None]
