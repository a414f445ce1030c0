"""The extra `train`: the further packages that training needs, and a check that they are installed."""

from __future__ import annotations

import importlib.util

from mcore_convert.errors import ConfigError

NEEDED = ("hydra", "omegaconf", "pydantic", "yaml")  # by the configuration; other modules check theirs


def require_extra() -> None:
    """Refuse to train without the extra, before anything of it is imported.

    Raises:
        ConfigError: names all packages that are missing.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"training needs {', '.join(f'`{name}`' for name in missing)}", hint="pip install 'mcore-convert[train]'"
        )
