"""Parts of pages: curves, layouts, files; and the commands that look."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from converters import gpt2
from mcore_convert import ConvertError, convert, diff, inspect, reshard
from mcore_convert.checkpoints import families
from mcore_convert.checkpoints.identify import identify
from mcore_convert.inspection.page.curve import MOST_POINTS, Metrics, curve_data, find_metrics, read_metrics
from mcore_convert.inspection.page.layouts import layout_data
from mcore_convert.inspection.page.render import write_page
from mcore_convert.spec import Layout
from mcore_convert.text.quantities import in_bytes, in_digits, in_parameters, in_percent, in_range
from tests.conftest import HfMaker, real_checkpoint
from tests.unit.test_cli import run


def metrics_of(losses: dict[int, float | None], evaluations: dict[int, float] | None = None) -> Metrics:
    result = Metrics()
    for iteration, loss in losses.items():
        result.iterations.append(iteration)
        result.losses.append(math.nan if loss is None else loss)
    if evaluations:
        result.evaluations["valid"] = dict(evaluations)
    return result


def points(text: str) -> np.ndarray[Any, Any]:
    return np.array([list(map(float, pair.split(","))) for pair in text.split(" ")]) / 1000


def test_metrics_are_read_whatever_else_is_there(tmp_path: Path) -> None:
    """As training writes them; torn and foreign lines are left out, and a loss that is no number is kept as such."""
    lines = [
        '{"iteration": 1, "loss": 3.5, "lr": 0.1}',
        '{"iteration": 2, "loss": null}',
        '{"iteration": 2, "evaluation": "valid", "loss": 3.25}',
        '{"iteration": "3", "loss": 1}',
        '{"iteration": true, "loss": 1}',
        "[1, 2]",
        "[" * 100_000,
        "not json",
        '{"iteration": 3, "loss": NaN}',
        '{"iteration": 4, "loss": 2.5}',
        '{"iteration": 5, "lo',
    ]
    file = tmp_path / "metrics.jsonl"
    file.write_bytes("\n".join(lines).encode() + b"\xff")
    result = read_metrics(file)
    assert list(result.iterations) == [1, 2, 3, 4]
    assert np.array_equal(list(result.losses), [3.5, math.nan, math.nan, 2.5], equal_nan=True)
    assert result.evaluations == {"valid": {2: 3.25}}
    assert find_metrics(tmp_path / "checkpoints/iter_0000004") == file
    assert find_metrics(tmp_path) == file
    assert find_metrics(tmp_path / "a/b/c") is None


def test_a_curve_is_drawn_to_scale() -> None:
    losses = {n: 4.0 - n / 10 for n in range(1, 11)}
    data = curve_data(metrics_of({**losses, 5: None}, {10: 3.5}), iteration=10)
    assert data is not None
    drawn = points(data["line"])
    assert drawn[:, 0] == pytest.approx([(n - 1) / 9 for n in losses if n != 5], abs=1e-4)
    low, high = (next(t["at"] for t in data["yTicks"] if t["label"] == label) for label in ("3.2", "3.8"))
    per_unit = (high - low) / 0.6
    assert drawn[:, 1] == pytest.approx([low + per_unit * (v - 3.2) for n, v in losses.items() if n != 5], abs=1e-3)
    assert (data["numBad"], data["bad"], data["mark"]) == (1, [round(4 / 9, 4)], 1.0)
    assert data["evaluations"][0]["points"][0][2:] == [10, 3.5]
    assert data["smooth"] is None
    assert [t["label"] for t in data["xTicks"]] == [str(n) for n in (2, 4, 6, 8, 10)]


def test_long_curves_keep_their_spikes_and_stay_small() -> None:
    rng = np.random.default_rng(0)
    losses = 2 + 5 * np.exp(-np.arange(100_000) / 5000) + rng.normal(0, 0.01, 100_000)
    losses[70_001] = 6.5
    data = curve_data(metrics_of(dict(enumerate(losses.tolist()))), iteration=None)
    assert data is not None
    drawn = points(data["line"])
    assert len(drawn) <= MOST_POINTS
    assert len(data["read"]) <= MOST_POINTS
    spike = drawn[np.argmin(np.abs(drawn[:, 0] - 70_001 / 99_999))]
    usual = drawn[np.abs(drawn[:, 0] - 0.6) < 0.05][:, 1].mean()
    assert spike[1] < usual - 0.4
    number, loss, smooth = data["read"][len(data["read"]) // 2]
    assert loss == pytest.approx(losses[number], rel=1e-4)
    assert smooth == pytest.approx(2 + 5 * math.exp(-number / 5000), rel=0.02)


@pytest.mark.parametrize("losses", [{}, {1: None, 2: None}])
def test_no_loss_is_no_curve(losses: dict[int, float | None]) -> None:
    assert curve_data(metrics_of(losses), None) is None


@pytest.mark.parametrize("losses", [{7: 2.0}, {1: 2.0, 2: 2.0}, {1: 1e-9, 2: 1e9}, {3: 0.0}])
def test_odd_curves_are_drawn_too(losses: dict[int, float | None]) -> None:
    data = curve_data(metrics_of(losses), 1)
    assert data is not None
    assert np.isfinite(points(data["line"])).all()
    assert json.dumps(data, allow_nan=False)
    labels = [tick["label"] for tick in data["xTicks"]]
    assert len(labels) == len(set(labels))


def test_a_resumed_run_counts_its_last_losses() -> None:
    result = metrics_of({1: 5.0, 2: 4.0, 3: 9.0})
    result.iterations.extend([2, 3])
    result.losses.extend([3.0, 2.0])
    data = curve_data(result, None)
    assert data is not None
    assert [row[:2] for row in data["read"]] == [[1, 5.0], [2, 3.0], [3, 2.0]]


# layouts


def test_the_choices_of_a_layout_fit(hf_checkpoint: HfMaker) -> None:
    """What a page offers is what `Layout.check` allows, and each pipeline has every layer once."""
    model = identify(hf_checkpoint("llama-gqa"))
    data = layout_data(model, Layout(tp=4, pp=2, first_stage_layers=1))
    assert data is not None
    assert [cut["tp"] for cut in data["cuts"]] == [1, 1, 2, 4, 8]
    assert data["cuts"][data["planned"]["cut"]]["tp"] == 4
    planned = data["pipelines"][data["planned"]["pipeline"]]
    assert planned["label"] == "2 stages (1/3 layers)"
    assert planned["stages"] == [[0, 0, 0, 1], [1, 0, 1, 4]]
    for pipeline in data["pipelines"]:
        layers = [layer for _, _, first, stop in pipeline["stages"] for layer in range(first, stop)]
        assert layers == list(range(4))
    qkv = next(weight for weight in data["weights"] if weight["name"].endswith("linear_qkv.weight"))
    pieces = model.family.weights[2].pack.pieces((128, 64), model.dims)
    assert sorted(qkv["bands"]) == sorted((p.tensor, p.mcore.offsets[0], p.mcore.sizes[0]) for p in pieces)


@pytest.mark.oracle
def test_experts_have_choices_too() -> None:
    model = identify(real_checkpoint("moe_legacy_pp2ep2"))
    data = layout_data(model, None)
    assert data is not None
    assert data["experts"] == {"1": [[0, 4]], "2": [[0, 2], [2, 4]], "4": [[0, 1], [1, 2], [2, 3], [3, 4]]}
    assert (data["optimizerBytes"], data["optimizerKnown"]) == (12, True)
    assert data["saved"]["ep"] == 2


@pytest.mark.oracle
def test_experts_cut_over_more_ranks_are_drawn(tmp_path: Path) -> None:
    reshard(real_checkpoint("moe_legacy_pp2ep2"), tmp_path / "dist", to="torch_dist", pp=2, ep=2)
    model = identify(tmp_path / "dist")
    assert layout_data(model, None) is not None
    elsewhere = {**model.args, "expert_tensor_parallel_size": 2}
    data = layout_data(dataclasses.replace(model, args=elsewhere), None)
    assert data is not None
    assert data["saved"]["etp"] == 2
    assert {len(cut["boxes"]) for cut in data["expertCuts"]["2"].values()} == {2}


# files and commands


def test_a_page_is_small_and_the_same_each_time(hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    source = hf_checkpoint("llama-gqa", fill="normal", config={"num_hidden_layers": 32})
    convert(source, tmp_path / "dist", tp=2)
    pages = [tmp_path / f"{number}.html" for number in (1, 2)]
    for page in pages:
        inspect(tmp_path / "dist", html=page, optimizer=True)
    first, second = (page.read_bytes() for page in pages)
    assert first == second
    assert len(first) < 300_000
    text = first.decode()
    addresses = set(re.findall(r"https?://[^\s\"'<>)]+", text))
    assert addresses == {"http://www.w3.org/2000/svg"}  # the name of a language, not an address
    assert "default-src 'none'" in text
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.oracle
def test_a_page_of_a_model_that_is_not_known_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = real_checkpoint("moe_legacy_pp2ep2")
    monkeypatch.setattr(families, "families", lambda: {"gpt2": gpt2.FAMILY})
    inspection = inspect(path, html=tmp_path / "page.html")
    assert inspection.statistics
    assert "no family can represent this model" in (tmp_path / "page.html").read_text()


def test_where_a_page_cannot_be_written_nothing_is_read(hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    source = hf_checkpoint("llama-gqa")
    (tmp_path / "folder.html").mkdir()

    def progress(done: int, total: int) -> None:
        raise AssertionError("it was read")

    for place, words in (("absent/page.html", "is not a directory"), ("folder.html", "is a directory")):
        with pytest.raises(ConvertError, match=words):
            inspect(source, html=tmp_path / place, progress=progress)
        with pytest.raises(ConvertError, match=words):
            diff(source, source, html=tmp_path / place, progress=progress)


def test_a_page_is_replaced_whole(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    write_page(file, "one")
    write_page(file, "two")
    assert file.read_text() == "two"
    assert list(tmp_path.iterdir()) == [file]


def test_inspect_shows_statistics(capsys: pytest.CaptureFixture[str], hf_checkpoint: HfMaker) -> None:
    source = hf_checkpoint("llama-gqa", fill="normal")
    code, out, err = run(capsys, "inspect", source, "--stats", "--tp", "2", "--pp", "2")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert "planned" in lines
    assert any(line.startswith("tp 1  embedding, layers 0-1: ") for line in lines)
    assert "decoder.layers.{0...3}" in lines
    (line,) = [line for line in lines if line.startswith("  mlp.linear_fc2.weight")]
    assert re.fullmatch(r"  mlp\.linear_fc2\.weight +\d+x\d+ +0\.\d+( - 0\.\d+)? +0\.\d+ +0 % +[▁-█]{4}", line)
    assert lines[-1] == "nothing stands out"
    code, out, _ = run(capsys, "inspect", source, "--stats", "--json")
    facts = json.loads(out)
    assert len(facts["statistics"]) == 27
    assert facts["statistics"][0]["rms"] == pytest.approx(0.1, rel=0.02)


def test_diff_shows_what_changed(capsys: pytest.CaptureFixture[str], hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    a, b = (hf_checkpoint("llama-gqa", fill="normal", seed=seed) for seed in (0, 1))
    page = tmp_path / "page.html"
    code, out, err = run(capsys, "diff", a, b, "--top", "3", "--html", page)
    assert (code, err) == (1, f"page written to {page}\n")
    assert "weights   27 of 27 changed" in out
    assert out.count("\nmost changed ") == 1
    assert len(out.splitlines()[-3:]) == 3
    code, out, _ = run(capsys, "diff", a, a)
    assert code == 0
    assert "weights  0 of 27 changed" in out
    code, out, _ = run(capsys, "diff", a, b, "--json")
    assert (code, json.loads(out)["equal"]) == (1, False)
    assert len(json.loads(out)["changes"]) == 27
    code, out, err = run(capsys, "diff", a, hf_checkpoint("gpt2"))
    assert (code, out) == (2, "")
    assert "cannot be compared" in err


@pytest.mark.parametrize(
    "arguments", [["inspect", "x", "--html", "model.safetensors"], ["inspect", "x", "--optimizer"], ["diff", "x"]]
)
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert "Error" in err


@pytest.mark.parametrize("command", ["inspect", "diff"])
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, command, "--help")
    assert code == 0
    assert f"Example: mcore-convert {command}" in " ".join(out.split())


def test_amounts() -> None:
    assert [in_bytes(n) for n in (0, 999, 1000, 2.47e9)] == ["0 B", "999 B", "1 kB", "2.47 GB"]
    assert [in_parameters(n) for n in (999, 1.24e9)] == ["999", "1.24 B"]
    assert [in_percent(share) for share in (0, 0.5, 0.99999, 1)] == ["0 %", "50 %", ">99.9 %", "100 %"]
    assert (in_digits(0.01234), in_range([1.0, 1.0001]), in_range([1, 2])) == ("0.0123", "1", "1 - 2")
