"""Shell completion beyond options and choices: families, and the keys and values of a run's configuration."""

from __future__ import annotations

import importlib.util


def families(incomplete: str) -> list[str]:
    """Return the installed families that begin with these letters."""
    from mcore_convert.checkpoints.families import families

    return [name for name in families() if name.startswith(incomplete)]


def formats(incomplete: str) -> list[str]:
    """Return the formats that can be written and begin with these letters."""
    from mcore_convert.formats.registry import targets

    return [name for name in targets() if name.startswith(incomplete)]


def megatron_formats(incomplete: str) -> list[str]:
    """Return the formats on Megatron's side that can be written and begin with these letters."""
    from mcore_convert.formats.base import Side
    from mcore_convert.formats.registry import targets

    return [name for name in targets(Side.MEGATRON) if name.startswith(incomplete)]


def ready_runs(incomplete: str) -> list[str]:
    """Return the ready runs that begin with these letters; the shell adds files."""
    if not _can_train():
        return []
    from train_entry.config.files import ready_runs

    return [name for name in ready_runs() if name.startswith(incomplete)]


def overrides(incomplete: str) -> list[str]:
    """Return the choices of groups (`parallel=tp2`) and the keys (`training.steps=`) that begin with these letters."""
    if not _can_train():
        return []
    from train_entry.config.files import choices
    from train_entry.config.nearest import groups, keys

    words = [f"{group}={choice}" for group in groups() for choice in choices(group)]
    words += [f"{key}=" for key in keys()]
    return [word for word in words if word.startswith(incomplete)]


def _can_train() -> bool:
    return all(importlib.util.find_spec(name) is not None for name in ("omegaconf", "pydantic", "yaml"))
