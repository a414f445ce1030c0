"""Phases of a training step: which time belongs to which."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch

from tests.report_steps import Ticks, config_of, step_of
from tests.unit.test_flops import GPT2
from train_entry.report.jsonl import read
from train_entry.report.phases import MAX_SEGMENTS, Phases
from train_entry.report.report import Report


def test_time_belongs_to_the_innermost_phase_but_in_evaluation_and_saving() -> None:
    ticks = Ticks()
    phases = Phases(clock=ticks)
    ticks.time = 100  # before the first phase, and between phases: nobody's
    with phases("forward-backward"):
        ticks.time += 1
        with phases("data"):
            ticks.time += 2
            with phases("data"):
                ticks.time += 4
        ticks.time += 8
    ticks.time += 100
    with phases("eval"):
        with phases("data"):
            ticks.time += 16
        with phases("forward-backward"), phases("save"):
            ticks.time += 32
        ticks.time += 64
    assert phases.read() == {"forward-backward": 9, "data": 6, "eval": 112}
    assert phases.read() == {}


def test_a_phase_ends_with_an_error_and_is_read_while_it_lasts() -> None:
    ticks = Ticks()
    phases = Phases(clock=ticks)

    def fail() -> None:
        with phases("optimizer"):
            ticks.time += 1
            with phases("data"):
                ticks.time += 2
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    ticks.time += 100
    with phases("save"):
        ticks.time += 4
        assert phases.read() == {"optimizer": 1, "data": 2, "save": 4}
        ticks.time += 8
    assert phases.read() == {"save": 8}


def test_phases_do_not_wait_until_they_are_read() -> None:
    """However many there are: those that the device has passed are summed up, the others are kept."""
    ticks = Ticks()
    phases = Phases(clock=ticks)
    count = 3 * MAX_SEGMENTS
    for number_of_phase in range(count):
        ticks.reached = ticks.time - 10
        with phases("data" if number_of_phase % 2 else "optimizer"):
            ticks.time += 1
    assert not ticks.waited
    assert len(phases._segments) <= MAX_SEGMENTS
    assert phases.read() == {"data": count / 2, "optimizer": count / 2}
    assert ticks.waited


def test_phases_on_the_host_are_seconds() -> None:
    phases = Phases()
    with phases("data"):
        torch.ones(300, 300) @ torch.ones(300, 300)
    assert 0 < phases.read()["data"] < 5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_step_on_a_gpu_waits_for_nothing(tmp_path: Path) -> None:
    weight = torch.ones(4096, 4096, device="cuda")
    with Report(config_of(tmp_path, interval=1000, steps=2000), GPT2, device="cuda", stream=io.StringIO()) as report:
        report.step(step_of(1))
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for iteration in range(2, 52):
                with report.phases("forward-backward"):
                    for _ in range(4):
                        product = weight @ weight
                with report.phases("optimizer"):
                    norm = product.max()
                report.step(step_of(iteration, loss=weight.sum(), grad_norm=norm))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        report.flush()
    rows = read(tmp_path / "run" / "metrics.jsonl")
    assert (rows[-1]["loss"], rows[-1]["grad_norm"]) == (4096**2, 4096)
    seconds = rows[-1]["phases"]
    assert seconds["forward-backward"] > 50 * 4 * 2 * 4096**3 / 1e15  # no device does 1000 TFLOP/s in fp32
    assert seconds["optimizer"] < seconds["forward-backward"]
    assert rows[-1]["memory"]["reserved"] >= rows[-1]["memory"]["allocated"] >= 4096**2 * 4
