"""A model with experts trains alike at every layout, its balancing losses included."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import test_train_layouts
from tests.ranks import run_ranks
from tests.test_train_layouts import config_of, run
from train_entry.config.compose import load_config

LAYOUTS: dict[str, dict[str, Any]] = {
    "ep2-distributed": {"ep": 2, "distributed_optimizer": True},
    "tp2-sp": {"tp": 2, "sequence_parallel": True},
    "tp2-sp-ep2": {"tp": 2, "sequence_parallel": True, "ep": 2},
    "cp2": {"cp": 2},
    "pp2": {"pp": 2},
}
# Strong enough that a loss of half the weight would show.
BALANCING = {"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.1}

Curve = list[tuple[float, float, float]]


def curve(folder: Path, ranks: int, parallel: dict[str, Any], balancing: dict[str, Any]) -> Curve:
    model = load_config("tiny-llama", ["model=tiny-llama-moe"]).model.model_dump()
    config = config_of(folder, model={**model, "hidden_size": 64, **balancing}, parallel=parallel)
    found: Curve = run_ranks(ranks, run, config)[0]
    return found


@pytest.fixture(scope="module", autouse=True)
def _few_steps() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(test_train_layouts, "STEPS", 4)
        yield


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Curve:
    return curve(tmp_path_factory.mktemp("reference"), 1, {}, BALANCING)


@pytest.mark.parametrize("name", LAYOUTS)
def test_experts_train_alike_at_every_layout(name: str, reference: Curve, tmp_path: Path) -> None:
    found = curve(tmp_path, 2, LAYOUTS[name], BALANCING)
    for step, (ours, theirs) in enumerate(zip(found, reference, strict=True)):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5), step


def test_the_balancing_losses_change_the_curve(reference: Curve, tmp_path: Path) -> None:
    """Or the comparison would not see them."""
    for coefficient in BALANCING:
        without = curve(tmp_path, 1, {}, {**BALANCING, coefficient: BALANCING[coefficient] / 2})
        assert max(abs(ours[0] - theirs[0]) for ours, theirs in zip(without, reference, strict=True)) > 3e-4
