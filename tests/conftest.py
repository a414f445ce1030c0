"""Tiny checkpoints shared by tests: each is made once in a run, and never written to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SHARED = Path(__file__).parents[2] / "shared" / "megatron_checkpoints"

HfMaker = Callable[..., Path]


@pytest.fixture(scope="session")
def hf_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> HfMaker:
    """`hf_checkpoint(name, **options)` of `fixtures.hf.make_hf`, made at the first call with these options."""
    from fixtures.hf import make_hf

    made: dict[tuple[Any, ...], Path] = {}

    def make(name: str, **options: Any) -> Path:
        key = (name, *sorted((k, repr(v)) for k, v in options.items()))
        if key not in made:
            made[key] = make_hf(name, tmp_path_factory.mktemp(name) / "hf", **options)
        return made[key]

    return make


def real_checkpoint(name: str) -> Path:
    """A checkpoint that Megatron-LM wrote; the test is skipped where they are not at hand."""
    path = SHARED / name
    if not path.is_dir():
        pytest.skip(f"the real Megatron-LM checkpoint {name} is not at hand")
    return path
