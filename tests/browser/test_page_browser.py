"""Pages in a real browser: what is drawn is what Megatron-LM's files and torch say; nothing is asked of the network.

The tests are skipped where no Chromium is installed.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator, Mapping
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
from mcore_convert.spec.layout import Rank
from mcore_convert.text.quantities import in_bytes
from tests.chromium import PHONE, WIDE, chromium, opened
from tests.conftest import HfMaker, real_checkpoint
from tests.tensors import dcp_tensors

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

ITERATION = 500
TIMES, TO = " \N{MULTIPLICATION SIGN} ", "\N{EN DASH}"
Boxes = list[tuple[int, list[int], list[int], dict[str, float]]]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


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


def choose(page: Page, rank: Rank, which: str = "saved") -> None:
    """Show a layout, and choose a rank of it."""
    page.locator(f"#tab-{which}").click()
    page.locator(f'[data-rank="{rank.tp},{rank.pp},{rank.ep}"]').first.click()


def number_in(locator: Locator, words: str) -> int:
    """The number before some words."""
    found = re.search(rf"([\d,]+) {words}", locator.inner_text())
    assert found is not None
    return int(found[1].replace(",", ""))


def shown_weights(page: Page) -> dict[str, tuple[int, ...]]:
    """What the panel of a rank lists: each weight, and the shape that the rank has of it."""
    found = {}
    for button in page.locator("#rank [data-weight]").all():
        words = button.locator(".what").first.inner_text()
        shape = words.split(" · ")[1]
        found[button.get_attribute("data-weight") or ""] = tuple(int(s.replace(",", "")) for s in shape.split(TIMES))
    return found


def boxes(page: Page, which: str) -> Boxes:
    """The boxes in a figure: tensor rank, offsets, sizes, and the rectangle on the screen."""
    found: Boxes = page.locator(f'[data-figure="{which}"] g[data-tp]').evaluate_all(
        """groups => groups.map(group => {
            const numbers = text => text.split(",").map(Number);
            const {x, y, width, height} = group.querySelector("rect").getBBox();
            return [Number(group.dataset.tp), numbers(group.dataset.offsets), numbers(group.dataset.sizes),
                    {x, y, width, height}];
        })"""
    )
    return found


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
        found = inspect(file.parent)
        assert cards["Layers"] == "8"
        assert cards["Vocabulary"] == "421"
        assert cards["Weights"] == in_bytes(found.nbytes)
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
    """The name of a weight without its layer and expert."""
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
                    stage, local = layout.stage_of(layer, 8)
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
    """A weight of a layer of a rank's file by its local number; chunks follow one another."""
    found = [tensor for name, tensor in saved if name.endswith(f"layers.{local}.{short}")]
    return found[chunk]


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
        found = page.locator(".outliers li").all_inner_texts()
        assert found[0].split("\n") == ["nan", "decoder.layers.3.mlp.linear_fc2.weight: 1 element is NaN, at [1, 2]"]
        page.locator(".outliers button").first.click()
        assert page.evaluate("document.activeElement.dataset.layer") == "3"
        said = page.locator("#readout").inner_text()
        assert "decoder.layers.3.mlp.linear_fc2.weight" in said
        assert "NaN, inf 1" in said
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowUp")
        said = page.locator("#readout").inner_text()
        assert said.startswith("decoder.layers.4.mlp.linear_fc1.weight")


def test_the_loss_can_be_read(browser: Browser, file: Path) -> None:
    with opened(browser, file) as page:
        assert "1,000 steps up to iteration 1,000" in page.locator("#h-curve + p").inner_text()
        page.locator("#plot").focus()
        page.keyboard.press("Home")
        assert "iteration 1 loss 9.9204" in page.locator("#curve-read").inner_text()
        box = page.locator("#plot").bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 20)
        found = re.match(r"iteration (\d+) loss ([\d.]+)", page.locator("#curve-read").inner_text())
        assert found is not None
        assert abs(int(found[1]) - 500) <= 3
        assert float(found[2]) == pytest.approx(2 + 8 * math.exp(-int(found[1]) / 100), rel=1e-4)
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
    found = diff(a, b, html=tmp_path / "page.html")
    first, second = (load_file(path / "model.safetensors") for path in (a, b))
    for viewport in (WIDE, PHONE):
        with opened(browser, tmp_path / "page.html", viewport=viewport) as page:
            assert page.evaluate("document.documentElement.scrollWidth") == viewport["width"]
            row = page.locator('[data-name="decoder.layers.{layer}.mlp.linear_fc2.weight"]')
            for layer in range(page.locator("#heat .row").first.locator(".cell").count()):
                row.locator(f'[data-layer="{layer}"]').focus()
                said = page.locator("#readout").inner_text()
                x, y = (side[f"transformer.h.{layer}.mlp.c_proj.weight"].double() for side in (first, second))
                shown = re.search(r"relative change (\S+) · changed (\S+) % · largest (\S+)", said)
                assert shown is not None
                wanted = [(y - x).norm() / x.norm(), 100 * (x != y).double().mean(), (y - x).abs().max()]
                assert [float(each) for each in shown.groups()] == pytest.approx([float(w) for w in wanted], rel=6e-3)
            names = page.locator("#most tbody th, #most tbody td:first-child").all_inner_texts()
            assert names == [change.name for change in found.most_changed(12)]
