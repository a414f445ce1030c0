"""Files of ranks that differ in values alone are laid out once, and are those that each rank would get on its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.checkpoints import make_hf
from benchmarks.experts import QWEN3_235B, qwen3_moe_shapes
from benchmarks.ranks import reserve_ranks
from mcore_convert import convert
from mcore_convert.conversion.plan import Plan
from mcore_convert.formats.files.torch_tree import TreeLayout
from mcore_convert.formats.mp_rank import writer
from mcore_convert.options import LayoutOptions
from mcore_convert.spec import Layout, Rank

MODEL: dict[str, Any] = QWEN3_235B | {
    "hidden_size": 32,
    "head_dim": 8,
    "moe_intermediate_size": 16,
    "num_attention_heads": 8,
    "num_experts": 8,
    "num_hidden_layers": 2,
    "vocab_size": 300,
}
LAYOUT: LayoutOptions = {"tp": 2, "pp": 2, "ep": 4, "etp": 1}
EXPERT = "model.layers.1.mlp.experts.5."


@pytest.fixture
def laid_out(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The trees of files that were laid out."""
    trees: list[Any] = []
    original = TreeLayout.of

    def counted(tree: Any) -> TreeLayout:
        trees.append(tree)
        return original(tree)

    monkeypatch.setattr(TreeLayout, "of", staticmethod(counted))
    return trees


def each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lay out each rank on its own from now on."""
    monkeypatch.setattr(writer._Model, "kind_of", lambda self, rank: rank)


def files_of(plan: Plan) -> tuple[Any, ...]:
    """Return what a plan writes before any tensor, and where it will write them."""
    reservation = plan.reservation
    literals = {(path, at): content for path, at, content in reservation.literals}
    return reservation.sizes, literals, [copy.target for move in plan.moves for copy in move.copies]


@pytest.mark.parametrize("wide", [False, True], ids=["one dtype", "an expert in float32"])
def test_weights(tmp_path: Path, laid_out: list[Any], monkeypatch: pytest.MonkeyPatch, *, wide: bool) -> None:
    shapes = qwen3_moe_shapes(MODEL)
    codes = {name: "F32" for name in shapes if name.startswith(EXPERT)} if wide else {}
    hf = make_hf(tmp_path / "hf", MODEL, shapes, shards=1, sparse=True, codes=codes)

    def planned() -> Plan:
        return convert(hf, tmp_path / "out", to="torch", dry_run=True, **LAYOUT).plan

    together = planned()
    assert len(laid_out) == (2 * 4 if wide else 2), "one for each stage, and expert rank where these differ"
    each_alone(monkeypatch)
    alone = planned()
    assert len(alone.reservation.sizes) == 8
    assert files_of(together) == files_of(alone)
    dtypes = {(rank.ep, local.view.dtype) for rank, file in together.target.files.items() for local in _experts(file)}  # type: ignore[attr-defined]
    assert dtypes == {(ep, "bfloat16") for ep in range(4)} | ({(2, "float32")} if wide else set())


def _experts(file: Any) -> list[Any]:
    return [local for chunk in file.chunks for name, local in chunk.items() if "experts" in name]


@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "distributed"])
def test_optimizer_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, distributed: bool) -> None:
    layout = Layout(tp=2, pp=2, ep=4, etp=1)
    for name in ("together", "alone"):
        reserved, _, _ = reserve_ranks(tmp_path / name, MODEL, layout, name="qwen3_moe", distributed=distributed)
        assert Rank(1, 1, 3) in reserved.files
        each_alone(monkeypatch)
    written = {
        name: {path.relative_to(tmp_path / name): path.read_bytes() for path in (tmp_path / name).rglob("*.pt")}
        for name in ("together", "alone")
    }
    assert len(written["alone"]) == (16 if distributed else 8)
    assert written["together"] == written["alone"]
