"""The registry of on-disk formats: those of this package, and those of others.

Another package adds a format through the entry point `mcore_convert.formats`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import lru_cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from mcore_convert.errors import ConfigError, ConvertError, UnreadableCheckpoint
from mcore_convert.formats import fsdp_dtensor, hf, mp_rank, torch_dist
from mcore_convert.formats.base import Side
from mcore_convert.formats.format import Format
from mcore_convert.plugins import REPAIR, Plugins, load

GROUP = "mcore_convert.formats"
# The first of each side is the default target of a conversion from the other side.
OWN = (hf.FORMAT, torch_dist.FORMAT, mp_rank.FORMAT, fsdp_dtensor.FORMAT, torch_dist.ZARR_FORMAT, hf.DCP_FORMAT)


@lru_cache(maxsize=1)
def plugins() -> Plugins[Format]:
    """Return the formats of other packages, and the reasons why some cannot be used."""
    return load(entry_points(group=GROUP), Format, "format")


@lru_cache(maxsize=1)
def formats() -> dict[str, Format]:
    """Return every known format by its name, without those of other packages that cannot be loaded.

    Raises:
        ConfigError: two packages have a format of one name.
    """
    known = {each.name: each for each in OWN}
    for each in plugins().objects:
        if each.name in known:
            raise ConfigError(f"two formats are called `{each.name}`", hint="uninstall one of their packages")
        known[each.name] = each
    return known


def broken() -> dict[str, str]:
    """Return the reasons why formats of other packages cannot be used, by name."""
    return plugins().broken


def targets(side: Side | None = None) -> tuple[str, ...]:
    """Return the names of the formats that can be written; those of one side if it is given."""
    return tuple(name for name, each in formats().items() if each.reserve is not None and side in (None, each.side))


def target_named(name: str) -> Format:
    """Return a format that can be written.

    Raises:
        ConvertError: there is none of this name; with a list of those that exist.
    """
    if name in broken():
        raise ConvertError(broken()[name], hint=REPAIR)
    if name not in targets():
        raise ConvertError(f"there is no format `{name}`", hint=f"known are {', '.join(targets())}")
    return formats()[name]


def default_target(side: Side) -> str:
    """Return the name of the default target format of a side."""
    return targets(side)[0]


def directory_of(path: Path) -> Path:
    """Return the directory of the checkpoint that a file or folder belongs to; the path itself if there is none.

    Raises:
        UnreadableCheckpoint: the checkpoint in that directory is read from other files.
    """
    directories = (each.directory_of(path) for each in formats().values())
    return next((directory for directory in directories if directory is not None), path)


def format_of(path: Path) -> Format | None:
    """Return the format of a checkpoint's own directory; None if no format recognises it.

    Raises:
        UnreadableCheckpoint: several formats recognise it.
    """
    claims = [each for each in formats().values() if each.detect(path)]
    if len(claims) > 1:
        raise UnreadableCheckpoint(
            f"`{path}` holds checkpoints in several formats",
            items=[f"{each.name}: {each.file_names}" for each in claims],
            hint="keep one of them in the directory",
        )
    return claims[0] if claims else None


def arguments_of(target: Format, args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with which a run saves the target format, and not another one."""
    others = {name: False for each in formats().values() for name in each.arguments if args.get(name)}
    named = {} if target.ckpt_format is None else {"ckpt_format": target.ckpt_format}
    return {**others, **target.arguments, **named}


def options_for(target: Format, given: Mapping[str, Any]) -> Any:
    """Return a format's options with the user's values; None means not given.

    Raises:
        ConvertError: the format does not have an option.
    """
    values = {name: value for name, value in given.items() if value is not None}
    own = {field.name for field in fields(target.options)}
    idle = [f"--{name.replace('_', '-')}" for name in values if name not in own]
    if idle:
        raise ConvertError(f"the format `{target.name}` has no use for {', '.join(idle)}", hint="leave it out")
    return target.options(**values)
