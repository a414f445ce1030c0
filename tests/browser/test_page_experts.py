"""Pages of models with experts: every expert's numbers are torch's, and ranks hold what is in their files."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mcore_convert import convert, diff, inspect
from mcore_convert.checkpoints.contents import family_of
from mcore_convert.checkpoints.identify import identify
from mcore_convert.formats.mp_rank.layout import rank_name
from mcore_convert.inspection.describe import dims_at
from mcore_convert.inspection.ranks import rank_parts
from mcore_convert.spec import Layout
from mcore_convert.text.quantities import in_bytes
from tests.browser.test_page_browser import TIMES, TO, boxes, choose, kind_of, number_in, rank_tensors, shown_weights
from tests.chromium import PHONE, WIDE, opened
from tests.conftest import HfMaker

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

LAYERS, EXPERTS = 5, 16
SMALL = {"num_hidden_layers": LAYERS, "num_experts": EXPERTS, "hidden_size": 32, "moe_intermediate_size": 16}
LAYOUT = Layout(tp=2, ep=4, etp=1)
FC1 = "decoder.layers.{layer}.mlp.experts.experts.{expert}.linear_fc1.weight"
FC2 = FC1.replace("fc1", "fc2")


@pytest.fixture(scope="module")
def folder(hf_checkpoint: HfMaker, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with experts of which one is large and one has a NaN, saved with experts whole at TP2, and its page."""
    path = tmp_path_factory.mktemp("experts")
    tensors = load_file(hf_checkpoint("qwen3_moe", fill="normal", config=SMALL) / "model.safetensors")
    tensors["model.layers.2.mlp.experts.14.up_proj.weight"] *= 9
    tensors["model.layers.4.mlp.experts.7.down_proj.weight"][3, 1] = math.nan
    (path / "hf").mkdir()
    save_file(tensors, path / "hf/model.safetensors", {"format": "pt"})
    (path / "hf/config.json").write_bytes((hf_checkpoint("qwen3_moe", config=SMALL) / "config.json").read_bytes())
    convert(path / "hf", path / "run", to="torch", tp=2, ep=4, etp=1)
    inspect(path / "run", html=path / "page.html", planned=Layout(tp=4, ep=2, etp=2))
    return path


def weights_of(tensors: dict[str, torch.Tensor], name: str, layer: int, expert: int) -> torch.Tensor:
    """Return what Megatron has of an expert, made of Hugging Face's tensors without this project."""
    start = f"model.layers.{layer}.mlp.experts.{expert}"
    if name == FC2:
        return tensors[f"{start}.down_proj.weight"].double()
    return torch.cat([tensors[f"{start}.{half}_proj.weight"] for half in ("gate", "up")]).double()


def shown_cells(page: Page) -> dict[tuple[int, int], str]:
    """Return what each cell of the experts' map says."""
    labels = page.locator("#experts .cell").evaluate_all("cells => cells.map(cell => cell.ariaLabel)")
    cells = {}
    for label in labels:
        match = re.match(r"layer (\d+), expert (\d+): ([^,]+)", label)
        assert match is not None
        cells[int(match[1]), int(match[2])] = match[3]
    return cells


def test_each_expert_has_its_numbers(browser: Browser, folder: Path) -> None:
    tensors = load_file(folder / "hf/model.safetensors")
    with opened(browser, folder / "page.html") as page:
        for number, name in enumerate((FC1, FC2)):
            page.locator("#expert-weight").select_option(str(number))
            for measure, value in MEASURES.items():
                page.locator(f'#expert-measures [data-value="{measure}"]').click()
                shown = shown_cells(page)
                assert len(shown) == LAYERS * EXPERTS
                for (layer, expert), text in shown.items():
                    weight = weights_of(tensors, name, layer, expert)
                    assert float(text.rstrip(" %")) == pytest.approx(value(weight[weight.isfinite()], weight), rel=6e-3)


MEASURES: dict[str, Any] = {
    "rms": lambda good, _: float(good.square().mean().sqrt()),
    "norm": lambda good, _: float(good.norm()),
    "largest": lambda good, _: float(good.abs().max()),
    "bad": lambda _, every: int((~every.isfinite()).sum()),
}


def test_experts_that_stand_out_are_marked(browser: Browser, folder: Path) -> None:
    tensors = load_file(folder / "hf/model.safetensors")
    with opened(browser, folder / "page.html") as page:
        marked = page.locator("#experts .noted")
        assert [marked.first.get_attribute("data-layer"), marked.first.get_attribute("data-expert")] == ["2", "14"]
        assert marked.count() == 1
        steps = page.locator("#experts .cell").evaluate_all("cells => cells.map(cell => Number(cell.dataset.step))")
        assert steps.index(max(steps)) == 2 * EXPERTS + 14
        marked.first.focus()
        read = page.locator("#expert-readout").inner_text()
        of_layer = torch.stack([weights_of(tensors, FC1, 2, e).square().mean().sqrt() for e in range(EXPERTS)])
        times = re.search(r"rms is (\S+) times the median of the layer's 16 experts", read)
        assert times is not None
        assert float(times[1]) == pytest.approx(float(of_layer[14] / of_layer.quantile(0.5)), rel=6e-3)
        assert "stands out" in read
        page.keyboard.press("ArrowDown")
        assert "layers.3.mlp.experts.experts.14.linear_fc1" in page.locator("#expert-readout").inner_text()
        page.locator("#expert-weight").select_option("1")
        labels = page.locator("#experts .noted").evaluate_all("cells => cells.map(cell => cell.ariaLabel)")
        assert [re.sub(": .*", "", label) for label in labels] == ["layer 4, expert 7"]


@pytest.mark.parametrize("viewport", [WIDE, PHONE], ids=["wide", "phone"])
def test_many_experts_fit(browser: Browser, folder: Path, viewport: Any) -> None:
    """Cells are wide enough to point at; where they do not fit, the map is scrolled, and not the page."""
    with opened(browser, folder / "page.html", viewport=viewport) as page:
        assert page.evaluate("document.documentElement.scrollWidth") == viewport["width"]
        cell = page.locator("#experts .cell").first.bounding_box()
        assert cell is not None
        assert cell["width"] >= 6
        assert cell["height"] >= 10


def test_a_rank_holds_the_experts_that_its_file_has(browser: Browser, folder: Path) -> None:
    """With experts whole and the rest cut: weights, local shapes and parameters of every rank, and its experts."""
    with opened(browser, folder / "page.html") as page:
        assert page.locator("#tab-saved").inner_text() == f"Saved {TIMES.join(['TP 2', 'EP 4', 'ETP 1'])}"
        ranks = list(LAYOUT.ranks())
        assert page.locator("#map .tile").count() == len(ranks) == 4
        for rank in ranks:
            saved = rank_tensors(folder / "run/release" / rank_name(rank, LAYOUT))
            choose(page, rank)
            kinds = {kind_of(name): tuple(tensor.shape) for name, tensor in saved}
            assert sorted(shown_weights(page).values()) == sorted(kinds.values())
            assert number_in(page.locator("#rank"), "parameters") == sum(tensor.numel() for _, tensor in saved)
        heads = page.locator("#map .side").all_inner_texts()
        assert heads == [f"tp {ep % 2} · ep {ep} · etp 0\nexperts {4 * ep}{TO}{4 * ep + 3}" for ep in range(4)]


def test_a_planned_cut_of_experts_has_the_sizes_of_its_ranks(browser: Browser, folder: Path) -> None:
    """All sizes of ETP, EP and TP together, against `rank_parts`; and what is drawn is what an expert's ranks have."""
    model = identify(folder / "run")
    with opened(browser, folder / "page.html") as page:
        assert page.locator('[data-plan="ETP"] option').all_inner_texts() == ["as TP", "1", "2"]
        choose(page, next(Layout(tp=4, ep=2, etp=2).ranks()), "planned")
        page.locator('#rank [data-weight*="linear_fc1"]').click()
        halves = [(part, [16 * half + 8 * part, 0], [8, 32]) for part in range(2) for half in range(2)]
        assert [tuple(box[:3]) for box in boxes(page, "planned")] == halves
        for tp, ep, etp in ((4, 2, 2), (2, 2, 1), (1, 8, 0), (2, 8, 2)):
            page.locator('[data-plan="TP"]').select_option(label=str(tp))
            page.locator('[data-plan="EP"]').select_option(str(ep))
            page.locator('[data-plan="ETP"]').select_option(str(etp))
            layout = Layout(tp=tp, ep=ep, etp=etp or None)
            parts = rank_parts(family_of(model), dims_at(model, tp), layout, "float32")
            assert page.locator("#map .tile").count() == len(parts)
            total = page.locator("#stacks > div:last-child .total").inner_text()
            assert total.endswith(f"{in_bytes(parts[0].nbytes)} + {in_bytes(8 * parts[0].num_parameters)}")
            choose(page, parts[-1].rank, "planned")
            assert number_in(page.locator("#rank"), "parameters") == parts[-1].num_parameters


def test_experts_that_are_cut_further_than_the_rest(browser: Browser, folder: Path, tmp_path: Path) -> None:
    """Over four ranks where two share the rest: every rank is drawn, with its own part of an expert."""
    layout = Layout(tp=2, ep=2, etp=4)
    model = identify(folder / "run")
    inspect(folder / "run", html=tmp_path / "page.html", planned=layout, stats=False)
    parts = rank_parts(family_of(model), dims_at(model, 2), layout, "float32")
    with opened(browser, tmp_path / "page.html") as page:
        assert page.locator("#tab-planned").inner_text() == f"Planned {TIMES.join(['TP 2', 'EP 2', 'ETP 4'])}"
        page.locator("#tab-planned").click()
        assert page.locator("#map .side").all_inner_texts() == [
            f"tp {etp % 2} · ep {ep} · etp {etp}\nexperts {8 * ep}{TO}{8 * ep + 7}"
            for ep in range(2)
            for etp in range(4)
        ]
        for part in parts:
            tile = f'[data-rank="{part.rank.tp},0,{part.rank.ep}"][data-etp="{part.rank.etp}"]'
            page.locator(tile).click()
            assert page.locator('#map [aria-pressed="true"]').count() == 1
            assert number_in(page.locator("#rank"), "parameters") == part.num_parameters
        page.locator('#rank [data-weight*="linear_fc1"]').click()
        assert {(box[0], *box[1], *box[2]) for box in boxes(page, "planned")} == {
            (etp, 16 * half + 4 * etp, 0, 4, 32) for etp in range(4) for half in range(2)
        }
        assert page.locator('[data-figure="planned"] .mine').count() == 2


def test_experts_that_changed(browser: Browser, folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "hf/model.safetensors")
    before = weights_of(tensors, FC2, 3, 9)
    tensors["model.layers.3.mlp.experts.9.down_proj.weight"] += 0.5
    (tmp_path / "b").mkdir()
    save_file(tensors, tmp_path / "b/model.safetensors", {"format": "pt"})
    (tmp_path / "b/config.json").write_bytes((folder / "hf/config.json").read_bytes())
    diff(folder / "hf", tmp_path / "b", html=tmp_path / "page.html")
    with opened(browser, tmp_path / "page.html") as page:
        page.locator("#expert-weight").select_option("1")
        shown = shown_cells(page)
        assert {place for place, text in shown.items() if float(text)} == {(3, 9)}
        wanted = (weights_of(tensors, FC2, 3, 9) - before).norm() / before.norm()
        assert float(shown[3, 9]) == pytest.approx(float(wanted), rel=6e-3)
