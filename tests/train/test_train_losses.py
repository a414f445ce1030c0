"""The loss of a run is one number wherever it is shown: in a line, in `metrics.jsonl`, in a card, beside the plot."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from mcore_convert.checkpoints.runs import Run
from tests.report_steps import config_of, step_of
from tests.unit.test_flops import GPT2
from train_entry.report.report import Report


@pytest.mark.parametrize("skipped", [False, True])
def test_one_loss_for_a_step(skipped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run whose loss falls steeply, with a curve that is smoothed; and with a last step that fp16 has skipped."""
    labels: list[str] = []
    save = Figure.savefig

    def recorded(figure: Figure, *args: object, **options: object) -> None:
        labels.extend(figure.axes[0].get_legend_handles_labels()[1])
        save(figure, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Figure, "savefig", recorded)
    words = io.StringIO()
    with Report(config_of(tmp_path, steps=40, plot=True), GPT2, stream=words) as report:
        for iteration in range(1, 41):
            last = skipped and iteration == 40
            report.step(step_of(iteration, loss=99.0 if last else 12.34567 / iteration, skipped=last))
    shown = re.findall(r"step +40/40  loss (\S+)", words.getvalue())
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    expected = f"{12.34567 / (39 if skipped else 40):.4f}"
    assert [row["loss"] for row in rows][38 if skipped else 39] == pytest.approx(float(expected), abs=1e-4)
    assert shown == [expected]
    assert labels == [f"training: {expected}"]
    run = Run(tmp_path / "run", tmp_path / "run" / "checkpoints")
    assert f"{run.loss_at(40)['train']:.4f}" == expected
