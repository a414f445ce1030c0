"""The training entry point: Megatron Core models, from a laptop's CPU to many GPUs, from HF weights to an HF export.

`python -m train_entry CONFIG` trains; `Trainer` is for users with a loop of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from train_entry.config.compose import load_config as load_config
    from train_entry.config.schema import Config as Config
    from train_entry.trainer import Trainer as Trainer

# Modules of the public names. They are imported on first access: the configuration needs no torch.
_HOMES = {
    "Config": "train_entry.config.schema",
    "Trainer": "train_entry.trainer",
    "load_config": "train_entry.config.compose",
}
__all__ = ["Config", "Trainer", "load_config"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module `{__name__}` has no attribute `{name}`")


def __dir__() -> list[str]:
    return sorted(__all__)
