"""The configuration of a run: hydra composes its groups, the command line overrides values, and pydantic checks them.

Relative paths in a configuration are relative to the working directory, and `~` is the home directory.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from mcore_convert.errors import ConfigError
from train_entry.config.files import CONFIGS, RunFile, locate, problems_of_defaults, read, syntax_error
from train_entry.config.overrides import COMMAND_LINE, DEFAULT, FLOW_OPTION, Overrides, read_overrides, unknown
from train_entry.config.problems import problems_of
from train_entry.config.schema import Config

PATHS = (
    "run_dir",
    "data.paths",
    "data.train_paths",
    "data.valid_paths",
    "data.test_paths",
    "data.tokenizer",
    "data.cache_dir",
    "checkpoint.init",
    "checkpoint.load",
)


def load_config(source: str, overrides: Sequence[str] = ()) -> Config:
    """The checked configuration of a run.

    Args:
        source: the path of a YAML file, the directory that a run left, or the name of a ready run.
        overrides: as on the command line: `parallel=tp2` selects a choice of a group, `training.steps=20` sets a value.

    Raises:
        ConfigError: names everything that is wrong, with the key that was probably meant, or what is allowed.
    """
    from omegaconf import OmegaConf

    run = read(locate(source))
    given = read_overrides(overrides, run.path.parent)
    problems = [*given.problems, *problems_of_defaults(run)]
    if len(problems) > len(given.problems):  # what it selects or inherits is not there: its own values can be checked
        composed = OmegaConf.create(dict(run.values))
    else:
        composed = _composed(run.path, given.selections)
    if "hydra" in run.values:  # it would take it as its own settings, without a word
        problems.append(unknown("hydra", run.where("hydra")))
    values = _resolved(composed, given, run, problems)
    try:
        config = Config.model_validate(_without_home(values))
    except ValidationError as error:
        problems += _lines(error, given, run)
    if problems:
        raise ConfigError(
            f"{len(problems)} problems in the configuration `{source}`" if len(problems) > 1 else problems[0],
            items=problems if len(problems) > 1 else (),
            hint="`mcore-convert train --list` shows ready runs and the choices of each group",
        )
    return config


def as_yaml(config: Config) -> str:
    """The configuration in full, which `load_config` reads back as it is."""
    from omegaconf import OmegaConf

    plain = _map_texts(config.model_dump(mode="json"), _escaped)
    text: str = OmegaConf.to_yaml(OmegaConf.create(plain))
    return text


def _composed(path: Path, selections: Mapping[str, str | None]) -> Any:
    """What hydra makes of a run's file and of the choices of groups."""
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from hydra.types import RunMode

    search = f"hydra.searchpath=[{_quoted(f'file://{CONFIGS}')}]"
    try:
        with _fresh_hydra(), initialize_config_dir(str(path.parent.absolute()), version_base="1.3"):
            present: set[str] = set()
            if selections:  # hydra tells a group that is selected already from one that is new
                loader = GlobalHydra.instance().config_loader()
                defaults = loader.compute_defaults_list(path.stem, [search], RunMode.RUN).defaults
                present = {str(default.config_path).rpartition("/")[0] for default in defaults}
            chosen = []
            for group, choice in selections.items():
                if choice is not None:
                    chosen.append(f"{'' if group in present else '+'}{group}={_quoted(choice)}")
                elif group in present:
                    chosen.append(f"~{group}")
            return compose(path.stem, [search, *chosen])
    except yaml.MarkedYAMLError as error:
        raise syntax_error(error, path) from error
    except HydraException as error:
        raise ConfigError(f"`{path}` cannot be composed: {str(error).strip().splitlines()[0]}") from error


@contextlib.contextmanager
def _fresh_hydra() -> Iterator[None]:
    """A scope with global state of its own: the caller may be in the middle of a program that hydra runs."""
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.singleton import Singleton
    from hydra.version import VersionBase

    before = {kind: Singleton._instances.pop(kind, None) for kind in (GlobalHydra, VersionBase)}
    try:
        yield
    finally:
        for kind, instance in before.items():
            Singleton._instances.pop(kind, None)
            if instance is not None:
                Singleton._instances[kind] = instance


def _resolved(composed: Any, given: Overrides, run: RunFile, problems: list[str]) -> dict[str, Any]:
    """Plain values: those of the schema, of the composed files and of the command line, one over the other.

    References (`${training.steps}`) see all of them. What cannot be resolved becomes a problem and is left out.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    schema = Config().model_dump(mode="json")
    merged = {**schema}
    for name, value in OmegaConf.to_container(composed, resolve=False).items():
        if isinstance(value, dict) and isinstance(merged.get(name), dict):
            merged[name] = {**merged[name], **value}
        elif value is not None:  # `training:` without a key is nothing
            merged[name] = value
    for key, value in given.values.items():
        if key.startswith(FLOW_OPTION):
            flow = merged["training"]["flow"]
            options = {"class": flow} if isinstance(flow, str) else dict(flow)
            merged["training"]["flow"] = {**options, key.removeprefix(FLOW_OPTION): value}
            continue
        group, _, name = key.rpartition(".")
        owner, default = (merged[group], schema[group]) if group else (merged, schema)
        if isinstance(owner, dict):  # else the file has a value where a group should be, a problem of its own
            owner[name] = default[name] if value is DEFAULT else value
    tree = OmegaConf.create(merged)
    values: dict[str, Any] = {}
    for name, value in merged.items():
        owner, target = (tree[name], values.setdefault(name, {})) if isinstance(value, dict) else (tree, values)
        for field in value if isinstance(value, dict) else [name]:
            key = f"{name}.{field}" if isinstance(value, dict) else name
            try:
                found = owner[field]
                target[field] = OmegaConf.to_container(found, resolve=True) if OmegaConf.is_config(found) else found
            except OmegaConfBaseException as error:
                missing = OmegaConf.is_missing(owner, field)
                reason = "has to be said" if missing else f"cannot be resolved: {str(error).splitlines()[0]}"
                problems.append(_with_place(f"`{key}` {reason}", key, given, run))
    return values


def _lines(error: ValidationError, given: Overrides, run: RunFile) -> Iterator[str]:
    for key, line in problems_of(error):
        yield _with_place(line, key, given, run) if line else unknown(key, _place(key, given, run))


def _with_place(line: str, key: str, given: Overrides, run: RunFile) -> str:
    place = _place(key, given, run)
    return f"{line} ({place})" if place else line


def _place(key: str, given: Overrides, run: RunFile) -> str:
    return COMMAND_LINE if key in given.values else run.where(key)


def _without_home(values: dict[str, Any]) -> dict[str, Any]:
    """The values with `~` of paths made the home directory."""
    changed = {name: dict(value) if isinstance(value, dict) else value for name, value in values.items()}
    for key in PATHS:
        group, _, name = key.rpartition(".")
        owner = changed.get(group) if group else changed
        if isinstance(owner, dict) and name in owner:
            owner[name] = _map_texts(owner[name], _at_home)
    return changed


def _at_home(text: str) -> str:
    return str(Path(text).expanduser()) if text == "~" or text.startswith("~/") else text


def _map_texts(value: Any, change: Any) -> Any:
    """The same lists and mappings with every text changed."""
    if isinstance(value, dict):
        return {key: _map_texts(inner, change) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_map_texts(inner, change) for inner in value]
    return change(value) if isinstance(value, str) else value


def _escaped(text: str) -> str:
    """Text in which OmegaConf sees no reference: backslashes before `${` are doubled, and one is added."""
    return re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + r"\${", text)


def _quoted(text: str) -> str:
    """Text as one value of hydra's command line."""
    escaped = re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + (r"\'" if found[2] else ""), text)
    return f"'{escaped}'"
