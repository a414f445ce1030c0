"""The picture of a run's losses, and numbers as people read them."""

from __future__ import annotations

import io
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mcore_convert.errors import UnreadableCheckpoint
from tests.kinds import ROOT
from tests.report_steps import step_of
from tests.unit.test_flops import LLAMA_1B
from tests.unit.test_report import Image
from train_entry.report.console import Console, in_bytes, in_time, number, scaled
from train_entry.report.flops import flops_per_token
from train_entry.report.metrics import Evaluation, Interval, Rates, Step, memory_of, warnings_of
from train_entry.report.plot import BAD, EVALUATIONS, TRAIN, plot, smoothed


def picture_of(folder: Path, losses: list[float | None], *, first: int = 1, valid: list[int] | None = None) -> Image:
    from matplotlib.image import imread

    rows: list[dict[str, Any]] = [
        {"iteration": i, "loss": loss, "lr": 1e-3 / i, "num_tokens": 512} for i, loss in enumerate(losses, first)
    ]
    rows += [{"iteration": i, "evaluation": "valid", "loss": 2.0} for i in valid or []]
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    path = plot(folder)
    assert path == folder / "loss.png"
    assert sorted(each.name for each in folder.iterdir()) == ["loss.png", "metrics.jsonl"]
    return imread(path)


def has(picture: Image, colour: str) -> bool:
    wanted = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return bool((np.abs(picture[..., :3] - wanted) < 0.01).all(axis=-1).any())


@pytest.mark.parametrize(
    ("losses", "valid", "shows"),
    [
        pytest.param([3.0], [], (True, False, False), id="one"),
        pytest.param([5.0, 4.0, 3.5, 3.2], [2, 4], (True, True, False), id="few"),
        pytest.param([4 + 3 / i for i in range(1, 200)], [100], (True, True, False), id="many"),
        pytest.param([4.0] * 30 + [None] * 3 + [4.0] * 30, [], (True, False, True), id="with NaN"),
        pytest.param([None, None], [], (False, False, True), id="all NaN"),
        pytest.param([*range(8, 4, -1), *[4.0] * 200, 4e4, *[4.0] * 200], [], (True, False, False), id="spike"),
    ],
)
@pytest.mark.slow
def test_the_picture_shows_what_there_is(
    tmp_path: Path, losses: list[float | None], valid: list[int], shows: tuple[bool, bool, bool]
) -> None:
    picture = picture_of(tmp_path / "run", losses, valid=valid)
    assert picture.shape[:2] == (960, 1600)
    curve = picture[200:745, 200:1200]  # beside the legend
    assert (has(curve, TRAIN), has(picture, EVALUATIONS[0]), has(curve, BAD)) == shows


def test_a_picture_needs_a_step(tmp_path: Path) -> None:
    with pytest.raises(UnreadableCheckpoint, match="no steps"):
        plot(tmp_path)


def test_smoothing_is_a_mean_of_means() -> None:
    """By the definition, one value at a time."""
    values = np.random.default_rng(1).normal(size=60)
    values[20:23] = np.nan

    def mean(of: Any, at: int, reach: int) -> float:
        near = of[at - min(reach, at) : at + min(reach, at) + 1]
        return float(np.nanmean(near))

    once = np.array([mean(values, at, 3) for at in range(60)])
    twice = np.array([mean(once, at, 3) for at in range(60)])
    twice[20:23] = np.nan
    np.testing.assert_allclose(smoothed(values, 6), twice)
    steep = np.array([100.0 / (1 + at) for at in range(50)])
    assert smoothed(steep, 6)[0] == 100.0


def test_numbers_for_people() -> None:
    seconds = (0.04, 59.94, 59.96, 185, 7620, 450000)
    assert [in_time(each) for each in seconds] == ["0.0s", "59.9s", "1m00s", "3m05s", "2h07m", "5d05h"]
    assert [scaled(each) for each in (0.5, 999.4, 999.6, 12345.0, 4.3e14)] == [
        ("0.500", ""),
        ("999", ""),
        ("1.00", "k"),
        ("12.3", "k"),
        ("430", "T"),
    ]
    assert [number(each) for each in (0.0, 0.0302, 1.234, 256.3, 1e5, math.inf, math.nan)] == [
        "0",
        "0.0302",
        "1.23",
        "256",
        "1.0e+05",
        "inf",
        "nan",
    ]
    assert in_bytes(41.24e9) == "41.2 GB"


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
def test_memory_is_the_most_that_this_process_has_had() -> None:
    before = memory_of(torch.device("cpu"))["resident"]
    most = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert most is not None
    assert before <= int(most[1]) * 1024 <= memory_of(torch.device("cpu"))["resident"] + 2**24


def test_the_page_shows_lines_as_they_are() -> None:
    """`docs/watch-a-run.md` has them where no run can make them again: on a GPU, and when something is wrong."""
    words = io.StringIO()
    console = Console(2000, words)
    steps = [Step.of(step_of(i, loss=11.4072, grad_norm=2.311, lr=3e-5, seconds=1.0)) for i in range(2, 11)]
    phases = {"forward-backward": 0.93 * 9, "optimizer": 0.06 * 9, "data": 0.004 * 9}
    speed = Rates(flops_per_token(LLAMA_1B), 1, 989.4).speed(52_440, 1.0)
    console.steps(Interval(steps, speed, {"allocated": 41_237_000_000}, phases, eta=1231.0), [])
    console.evaluation(Evaluation(500, "valid", 4.2135, seconds=3.1), {})
    message = words.getvalue().splitlines()
    nan = [Step.of(step_of(12, loss=math.nan))]
    skipped = [Step.of(step_of(i, skipped=True, loss_scale=8192.0)) for i in (3, 4, 5)]
    message += [f"warning: {text}" for each in (nan, skipped) for text in warnings_of(each)]
    page = (ROOT / "docs" / "watch-a-run.md").read_text().splitlines()
    assert [line for line in message if line not in page] == []
    assert len(message) == 4
