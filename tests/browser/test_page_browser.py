"""Pages in a real browser: what is drawn is what Megatron-LM's files and torch say; nothing is asked of the network.

The tests are skipped where no Chromium is installed.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from mcore_convert import convert, inspect
from mcore_convert.checkpoints.contents import family_of
from mcore_convert.checkpoints.identify import identify
from mcore_convert.formats.mp_rank.layout import rank_name
from mcore_convert.inspection.describe import dims_at
from mcore_convert.inspection.ranks import rank_parts
from mcore_convert.spec import Layout
from mcore_convert.spec.layout import Rank
from mcore_convert.text.quantities import in_bytes
from tests.chromium import PHONE, WIDE, opened
from tests.conftest import real_checkpoint
from tests.tensors import dcp_tensors

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page
from tests.browser.conftest import ITERATION

TIMES, TO = " \N{MULTIPLICATION SIGN} ", "\N{EN DASH}"


Boxes = list[tuple[int, list[int], list[int], dict[str, float]]]


def choose(page: Page, rank: Rank, which: str = "saved") -> None:
    """Show a layout, and choose a rank of it."""
    page.locator(f"#tab-{which}").click()
    page.locator(f'[data-rank="{rank.tp},{rank.pp},{rank.ep}"]').first.click()


def number_in(locator: Locator, words: str) -> int:
    """Return the number before some words."""
    matched = re.search(rf"([\d,]+) {words}", locator.inner_text())
    assert matched is not None
    return int(matched[1].replace(",", ""))


def shown_weights(page: Page) -> dict[str, tuple[int, ...]]:
    """Return what the panel of a rank lists: each weight, and the shape that the rank has of it."""
    result = {}
    for button in page.locator("#rank [data-weight]").all():
        words = button.locator(".what").first.inner_text()
        shape = words.split(" · ")[1]
        result[button.get_attribute("data-weight") or ""] = tuple(int(s.replace(",", "")) for s in shape.split(TIMES))
    return result


def boxes(page: Page, which: str) -> Boxes:
    """Return the boxes in a figure: tensor rank, offsets, sizes, and the rectangle on the screen."""
    result: Boxes = page.locator(f'[data-figure="{which}"] g[data-tp]').evaluate_all(
        """groups => groups.map(group => {
            const numbers = text => text.split(",").map(Number);
            const {x, y, width, height} = group.querySelector("rect").getBBox();
            return [Number(group.dataset.tp), numbers(group.dataset.offsets), numbers(group.dataset.sizes),
                    {x, y, width, height}];
        })"""
    )
    return result


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_it_fits_and_asks_for_nothing(browser: Browser, file: Path, scheme: Any, width: int) -> None:
    with opened(browser, file, viewport=WIDE if width == 1280 else PHONE, color_scheme=scheme) as page:
        assert page.evaluate("document.documentElement.scrollWidth") == width
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        red = int(re.findall(r"\d+", background)[0])
        assert red > 200 if scheme == "light" else red < 60
        assert page.locator("#heat .cell").count() == 6 * 8


def test_the_theme_can_be_turned(browser: Browser, file: Path) -> None:
    with opened(browser, file, color_scheme="light") as page:
        before = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.locator("#theme").click()
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert dark != before
        page.locator("#theme").click()
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == before


def test_what_stands_on_top(browser: Browser, file: Path) -> None:
    with opened(browser, file) as page:
        assert page.locator("h1").inner_text() == "run"
        names, values = (page.locator(f".card {each}").all_inner_texts() for each in ("dt", "dt + dd"))
        cards = dict(zip(names, values, strict=True))
        inspection = inspect(file.parent)
        assert cards["Layers"] == "8"
        assert cards["Vocabulary"] == "421"
        assert cards["Weights"] == in_bytes(inspection.nbytes)
        assert cards["Iteration"] == str(ITERATION)


@pytest.mark.parametrize("name", ["llama_legacy_tp2pp2", "gpt2_legacy_tp2pp2", "llama_legacy_vpp", "moe_legacy_pp2ep2"])
def test_a_rank_holds_what_megatron_saved_on_it(browser: Browser, name: str, tmp_path: Path) -> None:
    """Every rank of real runs: the weights, local shapes and parameters in its file, as torch loads it."""
    path = real_checkpoint(name)
    inspect(path, html=tmp_path / "page.html", stats=False)
    layout = identify(path).checkpoint.saved_layout
    assert layout is not None
    with opened(browser, tmp_path / "page.html") as page:
        for rank in layout.ranks():
            saved = rank_tensors(path / "iter_0000010" / rank_name(rank, layout))
            choose(page, rank)
            kinds = {kind_of(name): tuple(tensor.shape) for name, tensor in saved}
            assert sorted(shown_weights(page).values()) == sorted(kinds.values())
            assert number_in(page.locator("#rank"), "parameters") == sum(tensor.numel() for _, tensor in saved)


def rank_tensors(folder: Path) -> list[tuple[str, torch.Tensor]]:
    """Name and tensor of every weight in the file of a rank, all of its model chunks."""
    content = torch.load(folder / "model_optim_rng.pt", weights_only=False, map_location="cpu")
    chunks = [content[key] for key in sorted(content) if re.fullmatch(r"model\d*", key)]
    return [(k, t) for chunk in chunks for k, t in chunk.items() if isinstance(t, torch.Tensor) and "_extra" not in k]


def kind_of(name: str) -> str:
    """Return the name of a weight without its layer and expert."""
    return re.sub(r"(?<=layers\.|xperts\.)\d+", "*", name)


def test_the_drawn_boxes_hold_the_values_of_the_ranks(browser: Browser, run: Path, file: Path, tmp_path: Path) -> None:
    """Cut the global tensor that torch loads along the boxes on the page: it is what the files of the ranks hold."""
    layouts = {"saved": Layout(tp=2, pp=2, vpp=2), "planned": Layout(tp=4)}
    files = {}
    for which, layout in layouts.items():
        convert(run.parent / "hf", tmp_path / which, to="torch", tp=layout.tp, pp=layout.pp, vpp=layout.vpp)
        for rank in layout.ranks():
            files[which, rank] = rank_tensors(tmp_path / which / "release" / rank_name(rank, layout))
    whole = dcp_tensors(run / f"checkpoints/iter_{ITERATION:07}")
    names = {
        "self_attention.linear_qkv.weight",
        "self_attention.linear_proj.weight",
        "mlp.linear_fc1.weight",
        "mlp.linear_fc1.layer_norm_weight",
    }
    with opened(browser, file) as page:
        for short in sorted(names):
            page.locator('#weight [data-pick="weight"]').select_option(label=short)
            for layer in (0, 5):
                page.locator('#weight [data-pick="layer"]').select_option(str(layer))
                tensor = whole[f"decoder.layers.{short}"][layer]
                for which, layout in layouts.items():
                    stage, layers = next(each for each in layout.stages(8).items() if layer in each[1])
                    local = layer - layers.start
                    caption = page.locator(f'[data-figure="{which}"] figcaption').inner_text()
                    assert f"on pp {stage.pp}" in caption
                    drawn = boxes(page, which)
                    for tp in range(layout.tp):
                        mine = [box for box in drawn if box[0] == tp] or drawn  # what is not cut is drawn once
                        parts = [tensor[tuple(slice(o, o + s) for o, s in zip(*box[1:3], strict=True))] for box in mine]
                        dim = 1 if short.endswith("linear_proj.weight") else 0
                        held = torch.cat(parts, dim)
                        saved = stored_weight(files[which, Rank(tp, stage.pp)], short, local, stage.vpp)
                        torch.testing.assert_close(held, saved, rtol=0, atol=0, equal_nan=True)
                    assert_to_scale(drawn, tensor.shape)


def stored_weight(saved: list[tuple[str, torch.Tensor]], short: str, local: int, chunk: int) -> torch.Tensor:
    """Return a weight of a layer of a rank's file by its local number; chunks follow one another."""
    result = [tensor for name, tensor in saved if name.endswith(f"layers.{local}.{short}")]
    return result[chunk]


def assert_to_scale(drawn: Boxes, shape: torch.Size) -> None:
    """Rectangles lie on the picture as boxes lie in the tensor."""
    left, top = min(box[3]["x"] for box in drawn), min(box[3]["y"] for box in drawn)
    width = max(box[3]["x"] + box[3]["width"] for box in drawn) - left
    height = max(box[3]["y"] + box[3]["height"] for box in drawn) - top
    for _, offsets, sizes, at in drawn:
        if len(shape) == 2:
            assert (at["y"] - top) / height == pytest.approx(offsets[0] / shape[0], abs=1e-4)
            assert at["height"] / height == pytest.approx(sizes[0] / shape[0], abs=1e-4)
        assert (at["x"] - left) / width == pytest.approx(offsets[-1] / shape[-1], abs=1e-4)
        assert at["width"] / width == pytest.approx(sizes[-1] / shape[-1], abs=1e-4)


def test_every_planned_layout_has_the_sizes_of_its_ranks(browser: Browser, file: Path) -> None:
    """All that can be chosen on the page, against `rank_parts`, which sizes ranks in another way."""
    model = identify(file.parent / "checkpoints")
    with opened(browser, file) as page:
        tps = page.locator('[data-plan="TP"] option').all_inner_texts()
        pipelines = page.locator('[data-plan="Pipeline"] option').all_inner_texts()
        assert tps == ["1", "2", "4", "8"]
        assert pipelines == [
            "1 stage",
            "2 stages",
            "2 stages, 2 chunks each",
            "2 stages, 4 chunks each",
            "4 stages",
            "4 stages, 2 chunks each",
            "8 stages",
        ]
        for tp in tps:
            page.locator('[data-plan="TP"]').select_option(label=tp)
            for pipeline in pipelines:
                page.locator('[data-plan="Pipeline"]').select_option(label=pipeline)
                pp, *vpp = map(int, re.findall(r"\d+", pipeline))
                layout = Layout(tp=int(tp), pp=pp, vpp=vpp[0] if vpp else None)
                parts = rank_parts(family_of(model), dims_at(model, layout.tp), layout, "float32")
                assert page.locator("#map .tile").count() == layout.tp * pp * layout.num_virtual_stages
                totals = page.locator("#stacks > div:last-child .total").all_inner_texts()
                wanted = [part for part in parts if part.rank.tp == 0]
                assert len(totals) == pp
                for shown, part in zip(totals, wanted, strict=True):
                    weights, optimizer = in_bytes(part.nbytes), in_bytes(8 * part.num_parameters)
                    assert shown.endswith(f"{weights} + {optimizer}")
                last = parts[-1]
                choose(page, last.rank, "planned")
                assert number_in(page.locator("#rank"), "parameters") == last.num_parameters


def test_padding_is_drawn(browser: Browser, file: Path) -> None:
    with opened(browser, file) as page:
        page.locator('#weight [data-pick="weight"]').select_option(label="embedding.word_embeddings.weight")
        for which, rows in (("saved", 512), ("planned", 512)):
            title = page.locator(f'[data-figure="{which}"] .padding title').inner_html()
            assert title == f"{rows - 421} rows of padding"
            sizes = [box[2][0] for box in boxes(page, which)]
            assert sum(sizes) == rows


def test_ranks_can_be_chosen_with_the_keyboard(browser: Browser, file: Path) -> None:
    with opened(browser, file) as page:
        page.locator('[data-rank="0,0,0"]').first.focus()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")
        assert page.locator("#rank h3").inner_text() == "Rank tp 1 · pp 1"
        assert page.evaluate("document.activeElement.dataset.rank") == "1,1,0"
        pressed = page.locator('#map [aria-pressed="true"]')
        assert pressed.count() == 2  # both of its chunks
        page.locator("#tab-saved").focus()
        page.keyboard.press("ArrowRight")
        assert page.locator("#tab-planned").get_attribute("aria-selected") == "true"
        assert page.locator("#map").get_attribute("aria-labelledby") == "tab-planned"


def test_a_rank_shows_a_layer_that_it_has(browser: Browser, file: Path) -> None:
    """Its box is marked in the layout that it is of, and nowhere once a layer is shown that it does not have."""
    with opened(browser, file) as page:
        choose(page, Rank(1, 1))  # layers 2-3 and 6-7
        assert page.locator("#weight h3").inner_text() == "decoder.layers.2.self_attention.linear_qkv.weight"
        assert page.locator('[data-figure="saved"] g[data-tp="1"] .mine').count() == 1
        assert page.locator(".figures .mine").count() == 1
        page.locator('#weight [data-pick="layer"]').select_option("5")
        assert page.locator(".figures .mine").count() == 0


def test_the_table_says_what_is_drawn(browser: Browser, file: Path) -> None:
    with opened(browser, file) as page:
        page.locator('#weight [data-pick="weight"]').select_option(label="mlp.linear_fc2.weight")
        page.locator("#weight summary").click()
        rows = page.locator('[data-table="planned"] tbody tr').all_inner_texts()
        columns = identify(file.parent / "checkpoints").dims.ffn_hidden_size
        spans = [(tp * columns // 4, (tp + 1) * columns // 4 - 1) for tp in range(4)]
        wanted = [[f"tp {tp}, pp 0", f"columns {a}{TO}{b} of {columns}"] for tp, (a, b) in enumerate(spans)]
        assert [row.split("\t")[:2] for row in rows] == wanted
