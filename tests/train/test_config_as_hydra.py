"""Files that select and inherit read as hydra reads them: the same values, of many runs and choices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from train_entry import load_config
from train_entry.config.files import CONFIGS, ready_runs

# Files by their names in the folder of a run, `main` first, and groups that the command line selects.
CASES: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "own values come last without _self_": (
        {"main": "defaults: [tiny-gpt2]\ntraining: {steps: 7}\n"},
        {},
    ),
    "own values come first": (
        {"main": "defaults: [_self_, tiny-gpt2]\ntraining: {micro_batch_size: 7, seed: 5}\n"},
        {},
    ),
    "own values between choices": (
        {"main": "defaults: [{parallel: tp2}, _self_, {optimizer: sgd}]\noptimizer: {lr: 1, momentum: 0.5}\n"},
        {},
    ),
    "the outer file overrides the inner one": (
        {
            "main": "defaults: [middle, {override parallel: pp2}, _self_]\n",
            "middle": "defaults: [tiny-llama, {override parallel: tp2}, {override optimizer: sgd}, _self_]\n",
        },
        {},
    ),
    "the command line overrides both": (
        {
            "main": "defaults: [middle, {override parallel: pp2}, _self_]\n",
            "middle": "defaults: [tiny-llama, {override parallel: tp2}, _self_]\nparallel: {timeout_minutes: 3}\n",
        },
        {"parallel": "tp2-pp2-sp", "schedule": "constant"},
    ),
    "a group that no file selects comes over their values": (
        {"main": "parallel: {tp: 4, timeout_minutes: 3}\n"},
        {"parallel": "tp2-sp"},
    ),
    "a choice builds on a choice": (
        {
            "main": "defaults: [tiny-llama, {override model: wide}, _self_]\nmodel: {num_layers: 2}\n",
            "model/wide": "defaults: [tiny-llama, _self_]\nhidden_size: 256\n",
        },
        {},
    ),
    "a choice beside the run hides ours": (
        {"main": "defaults: [tiny-llama]\n", "optimizer/adamw": "lr: 0.5\n"},
        {},
    ),
    "several choices of a group": (
        {"main": "defaults: [{training: [cpu, mine]}, _self_]\n", "training/mine": "seed: 4\nsteps: 8\n"},
        {},
    ),
    "nothing of a group": (
        {"main": "defaults: [{parallel: tp2}, {optimizer: null}, _self_]\n"},
        {},
    ),
    "lists and mappings": (
        {
            "main": "defaults: [inner, _self_]\ndata: {paths: [c]}\ntraining: {flow: {beta: 2}}\n",
            "inner": "data: {paths: [a, b]}\ntraining: {flow: {class: 'a:B', beta: 1, other: [1, 2]}}\n",
        },
        {},
    ),
}


def by_hydra(folder: Path, name: str, selections: dict[str, str]) -> Any:
    """Return what hydra composes, with groups added that no file selects."""
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    actual = yaml.safe_load((folder / f"{name}.yaml").read_text()).get("defaults", [])
    added = {group for group in selections if not actual}
    words = [f"{'+' if group in added else ''}{group}={choice}" for group, choice in selections.items()]
    with initialize_config_dir(str(folder), version_base="1.3"):
        return OmegaConf.to_container(compose(name, [f"hydra.searchpath=['file://{CONFIGS}']", *words]), resolve=False)


def assert_set(composed: Any, config: Any) -> None:
    """Assert that the configuration has what hydra has, and the schema's value of what hydra has not."""
    plain, default = config.model_dump(mode="json"), type(config)().model_dump(mode="json")
    for key, value in default.items():
        if not isinstance(value, dict):
            assert plain[key] == composed.get(key, value), key
            continue
        for name, inner in value.items():
            expected = (composed.get(key) or {}).get(name, inner)
            assert plain[key][name] == expected, f"{key}.{name}"


@pytest.mark.filterwarnings("ignore:In 'main'. Defaults list is missing `_self_`:UserWarning")
@pytest.mark.parametrize("case", CASES)
def test_files_read_as_by_hydra(case: str, tmp_path: Path) -> None:
    files, selections = CASES[case]
    for name, text in files.items():
        path = tmp_path / f"{name}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    composed = by_hydra(tmp_path, "main", selections)
    words = [f"{group}={choice}" for group, choice in selections.items()]
    config = load_config(str(tmp_path / "main.yaml"), words)
    assert_set(composed, config)


@pytest.mark.parametrize("name", ready_runs())
def test_ready_runs_read_as_by_hydra(name: str) -> None:
    selections = {"parallel": "tp2-pp2-sp", "optimizer": "sgd"}
    words = [f"{group}={choice}" for group, choice in selections.items()]
    assert_set(by_hydra(CONFIGS, name, selections), load_config(name, words))
