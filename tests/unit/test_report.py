"""The report of a run: Megatron's count of operations, time per phase, and numbers that are each kept once."""

from __future__ import annotations

import io
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.report_steps import Ticks, config_of, run_until, step_of
from tests.unit.test_flops import GPT2
from train_entry.report.flops import flops_per_token
from train_entry.report.jsonl import read
from train_entry.report.metrics import Step, warnings_of
from train_entry.report.phases import Phases
from train_entry.report.report import Report


def test_a_line_every_few_steps_and_all_steps_in_the_file(tmp_path: Path) -> None:
    words = io.StringIO()
    with Report(config_of(tmp_path, peak_tflops=10), GPT2, world_size=4, stream=words) as report:
        for iteration in range(1, 26):
            report.step(step_of(iteration))
        assert [row["iteration"] for row in read(tmp_path / "run" / "metrics.jsonl")] == list(range(1, 21))
    lines = words.getvalue().splitlines()
    # the loss is that of the step; 16384 tokens/s of 798 MFLOP each on four devices of 10 TFLOP/s
    assert [re.findall(r"loss \S+", line) for line in lines] == [
        ["loss 1.0000"],
        ["loss 10.0000"],
        ["loss 20.0000"],
        ["loss 25.0000"],
    ]
    assert lines[1].startswith(
        "step 10/30  loss 10.0000  lr 3.00e-04  grad 1.50    16.4k tok/s  3.27 TFLOP/s  MFU 32.7%  "
    )
    assert "ETA" not in lines[0]
    assert "ETA" in lines[1]
    rows = read(tmp_path / "run" / "metrics.jsonl")
    assert [row["iteration"] for row in rows] == list(range(1, 26))
    assert [row["iteration"] for row in rows if "phases" in row] == [1, 10, 20, 25]
    expected = {
        "iteration": 7,
        "loss": 7.0,
        "grad_norm": 1.5,
        "lr": 3e-4,
        "num_tokens": 8192,
        "num_samples": 8,
        "seconds": 0.5,
        "tokens_per_second": 16384.0,
        "tflops": pytest.approx(flops_per_token(GPT2) * 16384 / 4 / 1e12),
        "mfu": pytest.approx(flops_per_token(GPT2) * 16384 / 4 / 1e13),
        "skipped": False,
    }
    assert rows[6] == expected
    assert 10e6 < rows[9]["memory"]["resident"] < 1e12


def test_a_cpu_has_no_mfu(tmp_path: Path) -> None:
    words = io.StringIO()
    with Report(config_of(tmp_path), GPT2, stream=words) as report:
        report.step(step_of(1))
    assert "FLOP/s" in words.getvalue()
    assert "MFU" not in words.getvalue()
    assert "mfu" not in read(tmp_path / "run" / "metrics.jsonl")[0]


def test_numbers_on_the_device_are_read_when_a_line_is_due(tmp_path: Path) -> None:
    """A tensor without data cannot be read, so a report that takes it has not waited for it."""
    nowhere = torch.empty((), device="meta")
    with Report(config_of(tmp_path), GPT2, stream=io.StringIO()) as report:
        known = {"loss": torch.tensor(2.5), "grad_norm": torch.tensor(0.5), "extra": {"accuracy": torch.tensor(0.25)}}
        report.step(step_of(1, **known))
        for iteration in range(2, 10):
            report.step(step_of(iteration, loss=nowhere, grad_norm=nowhere))
        with pytest.raises(RuntimeError, match="meta"):
            report.step(step_of(10))
    row = read(tmp_path / "run" / "metrics.jsonl")[0]
    assert (row["loss"], row["grad_norm"], row["extra"]) == (2.5, 0.5, {"accuracy": 0.25})


def test_phases_stand_in_the_line_and_in_the_file(tmp_path: Path) -> None:
    words, ticks = io.StringIO(), Ticks()
    with Report(config_of(tmp_path), GPT2, stream=words) as report:
        report.phases = Phases(clock=ticks)
        with report.phases("forward-backward"):
            ticks.time += 0.4
        with report.phases("optimizer"):
            ticks.time += 0.1
        with report.phases("save"):
            ticks.time += 0.5
        report.step(step_of(1))
    assert words.getvalue().rstrip().endswith("save 50%  fwd-bwd 40%  opt 10%")
    stored = read(tmp_path / "run" / "metrics.jsonl")[0]["phases"]
    assert stored == pytest.approx({"forward-backward": 0.4, "optimizer": 0.1, "save": 0.5})


def test_only_rank_0_shows_and_keeps_numbers(tmp_path: Path) -> None:
    words = io.StringIO()
    with Report(config_of(tmp_path, tensorboard=True, plot=True), GPT2, rank=3, world_size=16, stream=words) as report:
        report.step(step_of(1, loss=torch.empty((), device="meta")))
        report.evaluation(1, "valid", 2.0)
        report.flush()
        report.say("from rank 0 alone")
        report.say_all("first\nsecond")
    assert words.getvalue() == "[rank  3] first\n[rank  3] second\n"
    assert not (tmp_path / "run").exists()


def test_rank_0_speaks_for_itself_and_for_all(tmp_path: Path) -> None:
    words = io.StringIO()
    with Report(config_of(tmp_path), GPT2, world_size=2, stream=words) as report:
        report.say("hello")
        report.say_all("here")
    with Report(config_of(tmp_path), GPT2, stream=words) as report:
        report.say_all("alone")
    assert words.getvalue() == "hello\n[rank 0] here\nalone\n"


def test_evaluations_come_after_the_steps_before_them(tmp_path: Path) -> None:
    words = io.StringIO()
    with Report(config_of(tmp_path), GPT2, stream=words) as report:
        for iteration in range(1, 6):
            report.step(step_of(iteration))
        report.evaluation(5, "valid", math.log(20), num_tokens=4096, seconds=2.0, extra={"accuracy": 0.5})
    assert words.getvalue().splitlines()[-1] == "step  5/30  valid loss 2.9957  perplexity 20.0  accuracy 0.500  2.0s"
    rows = read(tmp_path / "run" / "metrics.jsonl")
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4, 5, 5]
    assert rows[-1] == {
        "iteration": 5,
        "evaluation": "valid",
        "loss": math.log(20),
        "perplexity": pytest.approx(20),
        "num_tokens": 4096,
        "seconds": 2.0,
        "extra": {"accuracy": 0.5},
    }


def test_what_is_wrong_is_reported_at_once_and_then_once_a_line(tmp_path: Path) -> None:
    words = io.StringIO()
    with Report(config_of(tmp_path), GPT2, stream=words) as report:
        for iteration in range(1, 13):
            report.step(step_of(iteration, loss=math.nan if iteration >= 4 else 1.0))
            if iteration == 4:
                assert "warning: the loss is nan at step 4\n" in words.getvalue()
    message = [line for line in words.getvalue().splitlines() if line.startswith("warning")]
    assert message == [f"warning: the loss is nan at {steps}" for steps in ("step 4", "steps 5-10", "steps 11-12")]
    assert "step 10/30  loss nan" in words.getvalue()
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    losses = [json.loads(line, parse_constant=pytest.fail)["loss"] for line in text.splitlines()]
    assert losses == [1.0] * 3 + [None] * 9


def test_skipped_steps_are_reported_and_their_loss_is_not_shown(tmp_path: Path) -> None:
    words = io.StringIO()
    with Report(config_of(tmp_path), GPT2, stream=words) as report:
        for iteration in range(1, 11):
            overflows = iteration in (5, 6, 7, 9)
            report.step(
                step_of(
                    iteration,
                    loss=99.0 if overflows else 2.0,
                    grad_norm=math.inf if overflows else 1.0,
                    skipped=overflows,
                    loss_scale=1024.0,
                )
            )
    lines = words.getvalue().splitlines()
    assert "skipped: the gradients overflowed, the weights did not change; the loss scale is now 1024" in lines[1]
    assert lines[3].startswith("warning: steps 6-7, 9 skipped: the gradients")
    assert lines[4].startswith("step  9/30  loss 2.0000 ")


def test_a_norm_that_is_not_finite_is_reported() -> None:
    steps = [Step.of(step_of(i, grad_norm=math.inf if i == 3 else 1.0)) for i in range(1, 5)]
    assert warnings_of(steps) == ["the norm of the gradients is not finite at step 3"]
    assert warnings_of([Step.of(step_of(1, grad_norm=None))]) == []


def test_a_resumed_run_has_each_step_once(tmp_path: Path) -> None:
    """In the file and in TensorBoard: what came after the checkpoint is replaced."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = config_of(tmp_path, tensorboard=True)
    run_until(config, 18)
    run_until(config, 30, start=12, offset=0.5)
    rows = read(config.run_dir / "metrics.jsonl")
    losses = [float(i) for i in range(1, 13)] + [i + 0.5 for i in range(13, 31)]
    assert [row["loss"] for row in rows if "evaluation" not in row] == losses
    assert [row["loss"] for row in rows if "evaluation" in row] == [5, 10, 15.5, 20.5, 25.5, 30.5]
    events = EventAccumulator(str(config.run_dir / "tensorboard"))
    events.Reload()
    assert [(each.step, each.value) for each in events.Scalars("train/loss")] == list(enumerate(losses, 1))
    assert [each.step for each in events.Scalars("valid/loss")] == [5, 10, 15, 20, 25, 30]
    assert {each.value for each in events.Scalars("speed/tokens_per_second")} == {16384.0}
    assert "memory/resident" in events.Tags()["scalars"]


def test_a_file_of_a_killed_run_goes_on_wherever_it_was_torn(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    run_until(config, 12)
    path = config.run_dir / "metrics.jsonl"
    whole = path.read_bytes()
    second_last = whole.rindex(b"\n", 0, whole.rindex(b"\n", 0, -1)) + 1
    for length in range(second_last, len(whole), 7):
        path.write_bytes(whole[:length])
        assert [row["iteration"] for row in read(path) if "evaluation" not in row][-1] in (10, 11)
        run_until(config, 14, start=10, offset=0.5)
        losses = [row["loss"] for row in read(path) if "evaluation" not in row]
        assert losses == [*map(float, range(1, 11)), 11.5, 12.5, 13.5, 14.5]
        assert path.read_bytes().startswith(whole[: whole.index(b'{"iteration": 11')])
    assert [each.name for each in config.run_dir.iterdir()] == ["metrics.jsonl"]


def test_lines_before_a_torn_one_are_not_rewritten(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    run_until(config, 10)
    path = config.run_dir / "metrics.jsonl"
    before = path.stat().st_ino
    run_until(config, 12, start=10)
    assert path.stat().st_ino == before
    assert len(read(path)) == 14


Image = Any
