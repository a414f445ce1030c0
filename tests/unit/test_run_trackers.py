"""Hand-over of a run to others: W&B, its directory, and the end of its report."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mcore_convert.errors import ConfigError, UnwritableTarget
from tests.report_steps import config_of, run_until, step_of
from tests.unit.test_flops import GPT2
from train_entry.report.jsonl import read
from train_entry.report.report import Report


@pytest.fixture
def fake_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package of that name which writes down how it is called; steps below `run.step` would be a mistake."""
    log = tmp_path / "calls.jsonl"
    (tmp_path / "packages" / "wandb").mkdir(parents=True)
    (tmp_path / "packages" / "wandb" / "__init__.py").write_text(
        f"""
import json

def note(**call):
    with open({str(log)!r}, "a") as file:
        file.write(json.dumps(call) + "\\n")

class Run:
    def __init__(self, id):
        self.id, self.step = id or "new-id", 16 if id else 0

    def log(self, values, step):
        assert step >= self.step
        self.step = step
        note(step=step, **values)

    def finish(self):
        note(finish=True)

def init(**options):
    note(**options)
    return Run(options["id"])
"""
    )
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    yield log
    sys.modules.pop("wandb", None)


def test_wandb_goes_on_with_the_run_that_it_knows(tmp_path: Path, fake_wandb: Path) -> None:
    config = config_of(tmp_path, wandb=True, wandb_project="project")
    run_until(config, 20)
    first = [json.loads(line) for line in fake_wandb.read_text().splitlines()]
    assert (first[0]["project"], first[0]["name"], first[0]["id"]) == ("project", "run", None)
    assert first[0]["config"]["training"]["steps"] == 30
    assert [call["step"] for call in first if "train/loss" in call] == list(range(1, 21))
    assert [(call["step"], call["valid/loss"]) for call in first if "valid/loss" in call] == [
        (5, 5.0),
        (10, 10.0),
        (15, 15.0),
        (20, 20.0),
    ]
    assert first[-1] == {"finish": True}
    fake_wandb.unlink()
    run_until(config, 20, start=12)  # it has 15 steps already, more than the checkpoint
    second = [json.loads(line) for line in fake_wandb.read_text().splitlines()]
    assert (second[0]["id"], second[0]["resume"]) == ("new-id", "allow")
    assert [call["step"] for call in second if "train/loss" in call] == [16, 17, 18, 19, 20]


def test_packages_that_are_missing_are_named_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("wandb", "matplotlib"):
        monkeypatch.setitem(sys.modules, name, None)
    for rank in (0, 1):
        with pytest.raises(ConfigError) as refusal:
            Report(config_of(tmp_path, wandb=True, plot=True), GPT2, rank=rank, world_size=2)
        assert refusal.value.items == ("logging.wandb=true needs `wandb`", "logging.plot=true needs `matplotlib`")
        assert "pip install 'mcore-convert[train,wandb]'" in str(refusal.value)
    assert not (tmp_path / "run").exists()


def test_a_run_directory_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(UnwritableTarget, match="run directory"):
        Report(config_of(tmp_path), GPT2)


def test_an_error_of_the_run_is_not_hidden_by_its_report(tmp_path: Path) -> None:
    def fail(loss: torch.Tensor) -> None:
        with Report(config_of(tmp_path), GPT2, stream=io.StringIO()) as report:
            report.step(step_of(1))
            report.step(step_of(2, loss=loss))
            raise KeyError

    with pytest.raises(KeyError):
        fail(torch.tensor(2.5))
    assert len(read(tmp_path / "run" / "metrics.jsonl")) == 2
    with pytest.raises(KeyError):
        fail(torch.empty((), device="meta"))  # as if its device were lost


def test_a_report_is_closed_once(tmp_path: Path) -> None:
    words = io.StringIO()
    report = Report(config_of(tmp_path, plot=True), GPT2, stream=words)
    report.close()
    assert words.getvalue() == ""  # no step, no picture
    report = Report(config_of(tmp_path, plot=True), GPT2, stream=words)
    report.step(step_of(1))
    report.close()
    report.close()
    assert words.getvalue().count("loss.png") == 1
