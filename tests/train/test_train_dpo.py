"""DPO as a user writes it (examples/dpo.py) against torch and transformers; options of a flow, and its reference."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fixtures.tokenizer import make_tokenizer
from mcore_convert.errors import ConfigError
from tests.conftest import HfMaker
from tests.curves import Curve, by_torch, by_trainer
from tests.kinds import ROOT
from tests.ranks import run_ranks
from tests.train.test_train_layouts import WEIGHT_DECAY, config_of
from train_entry import load_config
from train_entry.config.schema import Config
from train_entry.flows import flow_of
from train_entry.pretrain import pretrain

EXAMPLES = ROOT / "examples"
BETA, RATE = 0.1, 1e-3
LAYOUTS: dict[str, dict[str, Any]] = {"tp2": {"tp": 2}, "pp2": {"pp": 2}, "cp2": {"cp": 2}, "dp2": {}}


@pytest.fixture(autouse=True)
def _examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])


def config(run_dir: Path, init: str, **parallel: Any) -> Config:
    flow = {"class": "dpo:Dpo", "beta": BETA}
    return config_of(
        run_dir,
        training={"flow": flow, "micro_batch_size": 2},
        schedule={"style": "constant", "warmup_steps": 0},
        checkpoint={"init": init, "save": False},
        optimizer={"lr": RATE, "min_lr": RATE, "weight_decay": WEIGHT_DECAY},
        parallel=parallel,
    )


def by_transformers(path: Path) -> Curve:
    """Return the same in transformers and torch alone."""
    from transformers import AutoModelForCausalLM

    policy, reference = (AutoModelForCausalLM.from_pretrained(path).eval() for _ in range(2))

    def log_probabilities(model: Any, batch: dict[str, Tensor]) -> Tensor:
        logits: Tensor = model(batch["tokens"]).logits
        chosen = logits.log_softmax(-1).gather(2, batch["labels"][:, :, None])[:, :, 0]
        return (chosen * batch["loss_mask"]).sum(1)

    def dpo(batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            before = log_probabilities(reference, batch)
        gained = log_probabilities(policy, batch) - before
        margins = BETA * (gained[0::2] - gained[1::2])
        return -torch.nn.functional.logsigmoid(margins).mean(), margins.mean()

    return by_torch(policy, dpo, RATE)


def test_dpo_is_that_of_torch_and_transformers(hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    path = hf_checkpoint("llama-gqa", fill="normal")

    def all_layouts() -> dict[str, Curve]:
        return {
            name: by_trainer(config(tmp_path / name, str(path), **parallel), ["margin"])
            for name, parallel in LAYOUTS.items()
        }

    expected = by_transformers(path)
    assert expected[0][0] == pytest.approx(0.693147, abs=1e-5), "nothing is moved yet"
    assert abs(expected[1][0] - 0.693147) > 0.01
    for answer in run_ranks(2, all_layouts):
        for name, result in answer.items():
            for ours, theirs in zip(result, expected, strict=True):
                assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5), name


def test_the_example_learns_and_goes_on_with_the_same_reference(tmp_path: Path, hf_checkpoint: HfMaker) -> None:
    """By its own data set and from the command line's words; where it goes on, the reference is still the start."""
    make_tokenizer(tmp_path / "tokenizer", 300)
    pairs = [{"prompt": f"Say {n}:", "chosen": f" {n}", "rejected": " nothing at all"} for n in range(6)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    init = hf_checkpoint("gpt2", fill="normal", config={"vocab_size": 300})
    words = [
        *("model=checkpoint", f"checkpoint.init={init}", f"run_dir={tmp_path}/run", "schedule=constant"),
        *(
            "data.dataset=dpo:Preferences",
            f"data.paths=[{tmp_path}/pairs.jsonl]",
            f"data.tokenizer={tmp_path}/tokenizer",
        ),
        *("training.flow=dpo:Dpo", "training.flow.beta=0.5", "training.micro_batch_size=2", "training.seq_length=32"),
        *("training.global_batch_size=4", "logging=bare", "optimizer.lr=1e-3", "optimizer.min_lr=1e-3"),
    ]
    for steps in (3, 6):
        run_ranks(1, pretrain, load_config("tiny-gpt2", [*words, f"training.steps={steps}"]))
    whole = load_config("tiny-gpt2", [*words, f"run_dir={tmp_path}/whole", "training.steps=6"])
    run_ranks(1, pretrain, whole)
    rows, expected = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("run", "whole")
    )
    assert [row["loss"] for row in rows] == [row["loss"] for row in expected]
    assert rows[0]["loss"] == pytest.approx(0.693147, abs=1e-5)
    assert rows[-1]["loss"] < 0.6
    assert rows[-1]["extra"]["margin"] > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["training.flow=dpo:Dpo", "training.flow.betta=1"], "there is no `training.flow.betta`; did you mean `beta`?"),
        (
            ["training.flow=dpo:Dpo", "training.flow.beta=-1"],
            "`training.flow.beta` = -1: input should be",
        ),
        (["training.flow={class: 'dpo:Dpo', beta: x}"], "`training.flow.beta` = 'x': input should be a valid number"),
        (["training.flow=train_entry.flows:Pretraining", "training.flow.beta=1"], "it has no options"),
        (["training.flow=dpo:Dpo", "training.micro_batch_size=3"], "is no multiple of 2"),
        (
            ["training.flow=dpo:Dpo", "training.micro_batch_size=2"],
            "compares with a reference model, and none is named",
        ),
    ],
)
def test_options_that_a_flow_does_not_take(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        flow_of(load_config("tiny-gpt2", words))
    assert message in str(refused.value)


def test_options_by_file_and_words(tmp_path: Path) -> None:
    """A word replaces one option, and leaves the others; what is kept of a run is read back as it is."""
    (tmp_path / "run.yaml").write_text(
        "defaults: [tiny-gpt2, _self_]\ntraining:\n  micro_batch_size: 2\n  flow: {class: 'dpo:Dpo', beta: 0.2}\n"
        "checkpoint: {init: org/model}\n"
    )
    config = load_config(str(tmp_path / "run.yaml"))
    assert config.training.flow == {"class": "dpo:Dpo", "beta": 0.2}
    assert flow_of(config).beta == 0.2  # type: ignore[attr-defined]
    changed = load_config(str(tmp_path / "run.yaml"), ["training.flow.beta=0.7"])
    assert flow_of(changed).beta == 0.7  # type: ignore[attr-defined]
