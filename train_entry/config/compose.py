"""The configuration of a run: files select and inherit others, the command line overrides, and pydantic validates.

A file's `defaults` has the meaning that it has in hydra. Relative paths are relative to the working directory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mcore_convert.errors import ConfigError
from mcore_convert.spec.config.mapping import shown
from mcore_convert.text.names import meant
from train_entry.config.files import CONFIGS, DEFAULTS, ENDING, OWN, File, choices, locate, names_in, read, ready_runs
from train_entry.config.nearest import groups, keys, nearest
from train_entry.config.overrides import COMMAND_LINE, DEFAULT, read_overrides, unknown
from train_entry.config.problems import problems_of
from train_entry.config.schema import Config

FLOW = "training.flow"
NOTHING: tuple[bool, Any, list[Any]] = (False, None, [])


def load_config(source: str, overrides: Sequence[str] = ()) -> Config:
    """Compose the checked configuration of a run.

    Args:
        source: the path of a YAML file, the directory of an earlier run, or the name of a ready run.
        overrides: as on the command line: `parallel=tp2` selects a choice of a group, `training.steps=20` sets a value.

    Raises:
        ConfigError: lists every error, with the key that was probably meant, or the allowed values.
    """
    file, given = read(locate(source)), read_overrides(overrides)
    run = Composition(file.path.parent, given.selections)
    run.add(file)
    run.select_rest()
    for key, value in given.values:
        run.set(key, value, lambda _: COMMAND_LINE)
    values = run.resolved()
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        run.problems += dict.fromkeys(f"{line} ({run.places[key]})" for key, line in problems_of(error))
    problems = [*given.problems, *run.problems]
    if problems:
        raise ConfigError(
            f"{len(problems)} problems in the configuration `{source}`" if len(problems) > 1 else problems[0],
            items=problems if len(problems) > 1 else (),
            hint="`mcore-convert train --list` shows ready runs and the choices of each group",
        )
    return config


def as_yaml(config: Config) -> str:
    """Return the complete configuration, which `load_config` reads back unchanged."""
    from omegaconf import OmegaConf

    text: str = OmegaConf.to_yaml(OmegaConf.create(_escaped(config.model_dump(mode="json"))))
    return text


class Composition:
    """Values by their full dotted keys, as set by files and overrides in turn, and the problems with them.

    `places` are the places where they were set; `selections` are the choices of groups that take precedence over those
    of inner files, with their places.
    """

    def __init__(self, folder: Path, selections: Mapping[str, Any]) -> None:
        """Start the composition of a run whose file is in `folder`, with the choices of the command line."""
        self.folder = folder
        self.values: dict[str, Any] = {}
        self.places: dict[str, str] = {}
        self.problems: list[str] = []
        self.selections: dict[str, tuple[list[Any], str]] = {
            group: ([] if name is None else [name], COMMAND_LINE) for group, name in selections.items()
        }
        self.selected: set[str] = set()

    def add(self, file: File, group: str | None = None, outer: tuple[Path, ...] = ()) -> None:
        """Add the file of a run, or of a choice of `group`, with all that it selects and inherits, in that order."""
        if file.path in outer:
            self.problems.append(f"`{file.path}` inherits itself")
            return
        entries = [(_selection(entry, group), file.where(f"{DEFAULTS}.{n}")) for n, entry in enumerate(file.defaults)]
        for (overrides, other, names), where in entries:
            if overrides:
                self.selections.setdefault(other, (names, where))
        for (overrides, other, names), where in entries:
            if names == [OWN]:
                self._set_values(file, group)
            elif other is None and not names:
                pass  # no selection, see below
            elif other == group:
                self._add_named(group, names, where, (*outer, file.path))
            elif not overrides:
                self._select(other, names, where, (*outer, file.path))
        self.problems += [
            f"`{entry}` in `{DEFAULTS}` selects nothing ({where})"
            for entry, (selection, where) in zip(file.defaults, entries, strict=True)
            if selection == NOTHING and entry is not None
        ]
        if OWN not in file.defaults:
            self._set_values(file, group)

    def select_rest(self) -> None:
        """Add the choices of the command line for groups that no file selects, on top of the values of all files."""
        for group, (names, where) in self.selections.items():
            if group in self.selected:
                continue
            before = len(self.problems)
            if where == COMMAND_LINE:
                self._select(group, names, where, ())
            elif not self._are_choices(group, names, where) or before:
                pass  # the group may be selected by a file that is missing
            else:
                file = Path(where.rpartition(", line")[0])
                self.problems.append(
                    f"`{file}` cannot be composed: In '{file.stem}': Could not override '{group}'. Nothing selects it"
                )

    def set(self, key: str, value: Any, where: Callable[[str], str]) -> None:
        """Set a value, those of a group, or an option of a flow; a key that does not exist becomes a problem."""
        if key in groups() and isinstance(value, Mapping):
            for name, inner in value.items():
                self.set(f"{key}.{name}", inner, where)
        elif key in groups() and value is not None:  # `training:` without a key sets nothing
            line = "is not a group of keys; a choice of it is selected under `defaults:`, or as"
            self.problems.append(f"`{key}` = {shown(value)} {line} `{key}=CHOICE` ({where(key)})")
        elif key.startswith(f"{FLOW}."):  # its options are defined by the flow's own model
            flow = self.values.get(FLOW)
            options = dict(flow) if isinstance(flow, Mapping) else {"class": flow or ""}
            options[key.removeprefix(f"{FLOW}.")] = value
            self.values.pop(FLOW, None)  # the earlier options are included in these
            self.set(FLOW, {name: each for name, each in options.items() if each is not DEFAULT}, where)
        elif value is DEFAULT:
            self.values.pop(key, None)
        elif key in keys():
            before = self.values.get(key)
            if isinstance(before, Mapping) and isinstance(value, Mapping):
                value = {**before, **value}
            self.values[key], self.places[key] = value, where(key)
        elif key not in groups():
            self.problems.append(unknown(key, where(key)))

    def resolved(self) -> dict[str, Any]:
        """Return plain values by group and name, with the schema's defaults where nothing sets them.

        References (`${training.steps}`) see all of them. Unresolvable values become problems and are left out.
        """
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        values: dict[str, Any] = Config().model_dump(mode="json")
        for key, value in self.values.items():
            owner, name = _place_of(key, values)
            owner[name] = value
        references = [key for key, value in self.values.items() if "${" in str(value) or value == "???"]
        tree = OmegaConf.create(values) if references else None
        for key in references:
            (owner, name), (target, _) = _place_of(key, tree), _place_of(key, values)
            try:
                value = owner[name]
                target[name] = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
            except OmegaConfBaseException as error:
                missing = OmegaConf.is_missing(owner, name)
                reason = "has to be said" if missing else f"cannot be resolved: {str(error).splitlines()[0]}"
                self.problems.append(f"`{key}` {reason} ({self.places[key]})")
                del target[name]
        return values

    def _set_values(self, file: File, group: str | None) -> None:
        prefix = f"{group}." if group else ""
        for name, value in file.values.items():
            if "." in name and not group:
                self.problems.append(unknown(name, file.where(name)))
            else:
                self.set(prefix + name, value, lambda key: file.where(key.removeprefix(prefix)))

    def _select(self, group: str, names: list[Any], where: str, outer: tuple[Path, ...]) -> None:
        """Add the choices of a group: those of an outer file or of the command line if there are any, else these."""
        if group in self.selected:
            self.problems.append(f"`{group}` is selected before: write `override {group}: ...` ({where})")
            return
        self.selected.add(group)
        names, where = self.selections.get(group, (names, where))
        self._add_named(group, names, where, outer)

    def _add_named(self, group: str | None, names: list[Any], where: str, outer: tuple[Path, ...]) -> None:
        """Add choices of a group, or an inherited run: from beside the user's file, or else from this package."""
        if group is not None and not self._are_choices(group, names, where):
            return
        for name in names:
            paths = [folder / (group or "") / f"{name}{ENDING}" for folder in (self.folder, CONFIGS)]
            path = next((path for path in paths if path.is_file()), None)
            if path is None:
                near = nearest(str(name), {*ready_runs(), *names_in(self.folder)} - {outer[-1].stem})
                self.problems.append(f"there is no run `{name}` to inherit{meant(near)} ({where})")
                continue
            try:
                self.add(read(path), group, outer)
            except ConfigError as error:
                self.problems.append(error.message)

    def _are_choices(self, group: str, names: list[Any], where: str) -> bool:
        """Return whether a group and these choices of it exist; a missing one becomes a problem."""
        if group not in groups():
            self.problems.append(f"there is no group `{group}`{meant(nearest(group, groups()))} ({where})")
            return False
        known, before = choices(group, self.folder), len(self.problems)
        for name in names:
            if str(name) not in known:
                near = nearest(str(name), known)
                hint = f"did you mean `{group}={near}`? " if near else ""
                line = f"`{group}` has no choice `{name}`; {hint}it has {', '.join(known)} ({where})"
                self.problems.append(line)
        return len(self.problems) == before


def _selection(entry: Any, group: str | None) -> tuple[bool, Any, list[Any]]:
    """Parse an entry of a defaults list: whether it overrides, its group (that of the file for others), and names."""
    if isinstance(entry, str):
        other, _, name = entry.lstrip("/").rpartition("/")
        return False, other or group, [name]
    if not isinstance(entry, Mapping) or len(entry) != 1 or not str(next(iter(entry))).split():
        return NOTHING
    ((key, names),) = entry.items()
    *words, other = str(key).split()
    names = [each for each in (names if isinstance(names, list) else [names]) if each is not None]
    return "override" in words, other.lstrip("/").partition("@")[0], names


def _place_of(key: str, values: Any) -> tuple[Any, str]:
    """Return the mapping that contains a key, and the key's name in it."""
    group, _, name = key.rpartition(".")
    return (values[group] if group else values), name


def _escaped(value: Any) -> Any:
    """Escape texts so that OmegaConf reads no reference: backslashes before `${` doubled, and one added."""
    if isinstance(value, dict):
        return {key: _escaped(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_escaped(inner) for inner in value]
    return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + r"\${", value) if isinstance(value, str) else value
