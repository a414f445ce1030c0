"""A model with experts trains alike at every layout, its balancing losses included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.train.test_train_layouts import config_of, run
from train_entry.config.compose import load_config
from train_entry.config.schema import Config

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


def config(folder: Path, parallel: dict[str, Any], balancing: dict[str, Any]) -> Config:
    model = load_config("tiny-llama", ["model=tiny-llama-moe"]).model.model_dump()
    return config_of(folder, model={**model, "hidden_size": 64, **balancing}, parallel=parallel)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Curve:
    result: list[Curve] = run_ranks(1, run, config(tmp_path_factory.mktemp("reference"), {}, BALANCING))
    return result[0]


def test_experts_train_alike_at_every_layout(reference: Curve, tmp_path: Path) -> None:
    def all_layouts() -> dict[str, Curve]:
        return {name: run(config(tmp_path / name, parallel, BALANCING)) for name, parallel in LAYOUTS.items()}

    for answer in run_ranks(2, all_layouts):
        assert answer.keys() == LAYOUTS.keys()
        for name, result in answer.items():
            for step, (ours, theirs) in enumerate(zip(result, reference, strict=True)):
                assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5), (name, step)


def test_the_balancing_losses_change_the_curve(reference: Curve, tmp_path: Path) -> None:
    """Or the comparison would not see them."""

    def halved() -> list[Curve]:
        return [run(config(tmp_path / name, {}, {**BALANCING, name: BALANCING[name] / 2})) for name in BALANCING]

    ((*curves,),) = run_ranks(1, halved)
    for without in curves:
        assert max(abs(ours[0] - theirs[0]) for ours, theirs in zip(without, reference, strict=True)) > 3e-4
