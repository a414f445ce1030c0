"""The families that are installed, found through the entry point `mcore_convert.families`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import entry_points
from typing import Any

from mcore_convert.errors import ConfigError
from mcore_convert.spec.config import architectures_of
from mcore_convert.spec.family import Family

GROUP = "mcore_convert.families"
UNREPRESENTED = "mcore_convert.unrepresented"


@lru_cache(maxsize=1)
def families() -> dict[str, Family]:
    """Every installed family by its name; other packages add theirs through the entry point."""
    found = {point.name: point.load() for point in entry_points(group=GROUP)}
    for name, family in found.items():
        if not isinstance(family, Family) or family.name != name:
            raise ConfigError(f"the entry point `{name}` of `{GROUP}` is not a family of that name")
    if not found:
        raise ConfigError("no family is installed", hint="install the package: `pip install mcore-convert`")
    return dict(sorted(found.items()))


@lru_cache(maxsize=1)
def unrepresented() -> dict[str, str]:
    """Architectures that are known and not converted, and why; other packages add theirs through the entry point."""
    reasons = {name: why for point in entry_points(group=UNREPRESENTED) for name, why in point.load().items()}
    return dict(sorted(reasons.items()))


def named(name: str) -> Family:
    """The family of this name.

    Raises:
        ConfigError: there is none; those that exist are listed.
    """
    if name not in families():
        raise ConfigError(f"there is no family `{name}`", hint=f"known are {', '.join(families())}")
    return families()[name]


def of_config(config: Mapping[str, Any]) -> Family:
    """The family of a `config.json`, by its `architectures`, else its `model_type`.

    Raises:
        ConfigError: none reads it.
    """
    family = _reader_of(config)
    if family is not None:
        return family
    architectures, kind = architectures_of(config), config.get("model_type")
    reasons = [f"`{name}`: {unrepresented()[name]}" for name in architectures if name in unrepresented()]
    if reasons:
        raise ConfigError("such a model is not converted", items=reasons)
    shown = f"`architectures` = {architectures}" if architectures else f"`model_type` = {kind!r}"
    known = [name for family in families().values() for name in family.architectures]
    raise ConfigError(f"no family reads a model with {shown}", hint=f"known architectures are {', '.join(known)}")


def _reader_of(config: Mapping[str, Any]) -> Family | None:
    architectures, kind = architectures_of(config), config.get("model_type")
    for family in families().values():
        types = {mapping.model_type for mapping in (family.config, *family.config.dialects)}
        if set(architectures) & set(family.architectures) or (not architectures and kind in types):
            return family
    return None


def of_arguments(args: Mapping[str, Any], config: Mapping[str, Any] | None = None) -> Family:
    """The family of normalised Megatron arguments: the first that can represent them.

    Several families may be the same to Megatron. Where an original `config.json` is known, its family comes first.

    Raises:
        ConfigError: none can; the reasons of each are listed.
    """
    reasons = []
    reader = None if config is None else _reader_of(config)
    for family in [*([reader] if reader else []), *families().values()]:
        refusals = family.config.refusals(args)
        if not refusals:
            return family
        reasons += [f"{family.name}: {reason}" for reason in refusals]
    raise ConfigError("no family can represent this model", items=dict.fromkeys(reasons))
