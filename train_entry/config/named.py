"""Classes and functions of the user, which a configuration names as `module:name`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from mcore_convert.errors import ConfigError
from mcore_convert.text.names import meant
from train_entry.config.nearest import nearest


def is_named(text: str) -> bool:
    """Return whether a text has the form `module:name`."""
    module, colon, name = text.partition(":")
    return bool(colon and module and name)


def named(key: str, text: str, *, kind: type = object, what: str = "class") -> Any:
    """Import the object that a key of the configuration names, also from the working directory, as `python -m` does.

    Args:
        kind: `type` if it must be a class.
        what: its kind in messages.

    Raises:
        ConfigError: it has another form, or there is no such module or name.
    """
    if not is_named(text):
        raise ConfigError(f"`{key}` = `{text}` names no {what}", hint="write module:Class, as my_flows.dpo:Dpo")
    module_name, _, name = text.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        member: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # a module that the user's module imports
        raise ConfigError(
            f"`{key}` = `{text}`: there is no module `{error.name}`",
            hint=f"it is looked for in {here} and where Python finds packages (PYTHONPATH)",
        ) from error
    owner = member
    for part in name.split("."):
        owner, member = member, getattr(member, part, None)
        if member is None:
            break
    if not isinstance(member, kind) or not callable(member):
        near = nearest(
            name, [each for each, value in vars(owner).items() if isinstance(value, kind) and callable(value)]
        )
        raise ConfigError(f"`{key}` = `{text}`: `{module_name}` has no {what} `{name}`{meant(near)}")
    return member
