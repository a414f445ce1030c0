"""The browser, and a run whose page it opens."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from safetensors.torch import load_file, save_file

from mcore_convert import convert, inspect
from mcore_convert.spec import Layout
from tests.chromium import chromium
from tests.conftest import HfMaker

if TYPE_CHECKING:
    from playwright.sync_api import Browser


ITERATION = 500


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as result:
        yield result


@pytest.fixture(scope="module")
def run(hf_checkpoint: HfMaker, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with metrics, saved at TP2 x PP2 with two virtual stages, in which some values stand out."""
    folder = tmp_path_factory.mktemp("page")
    shutil.copytree(hf_checkpoint("llama-gqa", fill="normal", config={"num_hidden_layers": 8}), folder / "hf")
    tensors = load_file(folder / "hf/model.safetensors")
    tensors["model.layers.3.mlp.down_proj.weight"][1, 2] = math.nan
    tensors["model.layers.5.mlp.up_proj.weight"] *= 6
    save_file(tensors, folder / "hf/model.safetensors", {"format": "pt"})
    convert(folder / "hf", folder / "run/checkpoints", to="torch_dist", tp=2, pp=2, vpp=2, iteration=ITERATION)
    rows = [{"iteration": n, "loss": 2 + 8 * math.exp(-n / 100)} for n in range(1, 1001)]
    rows[299]["loss"] = None  # type: ignore[assignment]
    lines = [json.dumps(row) for row in (*rows, {"iteration": 1000, "evaluation": "valid", "loss": 2.5})]
    (folder / "run/metrics.jsonl").write_text("\n".join(lines) + '\n{"iteration": 10')
    return folder / "run"


@pytest.fixture(scope="module")
def file(run: Path) -> Path:
    inspect(run, html=run / "page.html", planned=Layout(tp=4))
    return run / "page.html"
