"""The page's heat map, outliers, losses and differences, in a browser."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mcore_convert import diff, inspect
from tests.chromium import PHONE, WIDE, opened
from tests.conftest import HfMaker
from tests.tensors import dcp_tensors

if TYPE_CHECKING:
    from playwright.sync_api import Browser
from tests.browser.conftest import ITERATION


def test_the_heat_map_has_the_values(browser: Browser, run: Path, file: Path) -> None:
    """Each cell's number is torch's; colours rise with the values of a row; what stands out is marked."""
    tensors = dcp_tensors(run / f"checkpoints/iter_{ITERATION:07}")
    with opened(browser, file) as page:
        for measure, value in MEASURES.items():
            page.locator(f'#measures [data-value="{measure}"]').click()
            rows = page.locator("#heat .row[data-name]").evaluate_all(
                """rows => rows.map(row => [
                    row.dataset.name, [...row.lastChild.children].map(cell => [cell.ariaLabel, cell.dataset.step])
                ])"""
            )
            assert len(rows) == 6
            for full_name, cells in rows:
                name = full_name.replace(".{layer}", "")
                wanted = [value(tensors[name][layer].double()) for layer in range(8)]
                shown = [float(re.sub(r"^layer \d+: |,.*| %", "", label)) for label, _ in cells]
                scale = 100 if measure == "zeros" else 1
                assert shown == pytest.approx([scale * each for each in wanted], rel=6e-3)
                steps = [int(step) for _, step in cells]
                order = sorted(range(8), key=lambda layer, wanted=wanted: wanted[layer])  # type: ignore[misc]
                assert [steps[layer] for layer in order] == sorted(steps)
        marked = page.locator("#heat .noted").evaluate_all("cells => cells.map(c => c.dataset.layer)")
        assert sorted(marked) == ["3", "5"]


def _finite(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[tensor.isfinite()]


MEASURES: Mapping[str, Any] = {
    "rms": lambda t: float(_finite(t).square().mean().sqrt()),
    "norm": lambda t: float(_finite(t).norm()),
    "largest": lambda t: float(_finite(t).abs().max()),
    "zeros": lambda t: float((t == 0).double().mean()),
    "bad": lambda t: int((~t.isfinite()).sum()),
}


def test_what_stands_out_leads_to_its_cell(browser: Browser, file: Path) -> None:
    with opened(browser, file) as page:
        text = page.locator(".outliers li").all_inner_texts()
        assert text[0].split("\n") == ["nan", "decoder.layers.3.mlp.linear_fc2.weight: 1 element is NaN, at [1, 2]"]
        page.locator(".outliers button").first.click()
        assert page.evaluate("document.activeElement.dataset.layer") == "3"
        message = page.locator("#readout").inner_text()
        assert "decoder.layers.3.mlp.linear_fc2.weight" in message
        assert "NaN, inf 1" in message
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowUp")
        message = page.locator("#readout").inner_text()
        assert message.startswith("decoder.layers.4.mlp.linear_fc1.weight")


def test_the_loss_can_be_read(browser: Browser, file: Path) -> None:
    with opened(browser, file) as page:
        assert "1,000 steps up to iteration 1,000" in page.locator("#h-curve + p").inner_text()
        page.locator("#plot").focus()
        page.keyboard.press("Home")
        assert "iteration 1 loss 9.9204" in page.locator("#curve-read").inner_text()
        box = page.locator("#plot").bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 20)
        matched = re.match(r"iteration (\d+) loss ([\d.]+)", page.locator("#curve-read").inner_text())
        assert matched is not None
        assert abs(int(matched[1]) - 500) <= 3
        assert float(matched[2]) == pytest.approx(2 + 8 * math.exp(-int(matched[1]) / 100), rel=1e-4)
        mark = page.locator(".curve .mark").get_attribute("x1")
        assert float(mark or 0) == pytest.approx(1000 * (ITERATION - 1) / 999, abs=0.1)
        assert page.locator(".curve .bad").count() == 1
        assert page.locator(".curve .dot").get_attribute("title") == "valid at 1000: 2.5"


def test_names_of_strangers_do_nothing(browser: Browser, tmp_path: Path) -> None:
    """A tensor whose name is a script is shown as text; a directory's name too."""
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&"
    path = tmp_path / 'x"><script>alert(3)<'
    path.mkdir()
    tensors = {f"model.layers.{layer}.{evil}.weight": torch.full((3, 4), math.nan) for layer in range(2)}
    save_file({**tensors, evil: torch.ones(3)}, path / "model.safetensors", {"format": "pt", "x": evil})
    (path / "config.json").write_text(json.dumps({"architectures": [evil], "model_type": evil}))
    inspect(path, html=tmp_path / "page.html")
    with opened(browser, tmp_path / "page.html") as page:
        assert evil in page.locator("#h-stored").locator("xpath=../..").inner_text()
        page.locator("#heat .cell").first.focus()
        assert evil in page.locator("#readout").inner_text()
        assert page.locator("img").count() == 0
        page.locator(".outliers button").first.click()


def test_the_numbers_are_there_without_scripts(browser: Browser, file: Path) -> None:
    with opened(browser, file, java_script_enabled=False) as page:
        text = page.content()
        assert "The drawings on this page need JavaScript" in text
        rows = page.locator("details table tbody tr").all_text_contents()
        assert any(row.startswith("decoder.layers.{layer}.mlp.linear_fc1.weight") for row in rows)


def test_a_page_of_differences(browser: Browser, hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    a, b = (hf_checkpoint("gpt2", fill="normal", seed=seed) for seed in (0, 1))
    actual = diff(a, b, html=tmp_path / "page.html")
    first, second = (load_file(path / "model.safetensors") for path in (a, b))
    for viewport in (WIDE, PHONE):
        with opened(browser, tmp_path / "page.html", viewport=viewport) as page:
            assert page.evaluate("document.documentElement.scrollWidth") == viewport["width"]
            row = page.locator('[data-name="decoder.layers.{layer}.mlp.linear_fc2.weight"]')
            for layer in range(page.locator("#heat .row").first.locator(".cell").count()):
                row.locator(f'[data-layer="{layer}"]').focus()
                text = page.locator("#readout").inner_text()
                x, y = (side[f"transformer.h.{layer}.mlp.c_proj.weight"].double() for side in (first, second))
                shown = re.search(r"relative change (\S+) · changed (\S+) % · largest (\S+)", text)
                assert shown is not None
                wanted = [(y - x).norm() / x.norm(), 100 * (x != y).double().mean(), (y - x).abs().max()]
                assert [float(each) for each in shown.groups()] == pytest.approx([float(w) for w in wanted], rel=6e-3)
            names = page.locator("#most tbody th, #most tbody td:first-child").all_inner_texts()
            assert names == [change.name for change in actual.most_changed(12)]
