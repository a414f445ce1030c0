"""The benchmark of planning: its model is that of the Hub, and its sources without values are whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.checkpoints import write_headers
from benchmarks.deepseek import DEEPSEEK_V3, deepseek_nbytes, deepseek_shapes, make_deepseek
from benchmarks.experts import QWEN3_235B, make_qwen3_moe, qwen3_moe_nbytes
from benchmarks.plan import DEEPSEEK_LAYOUT, LAYOUT
from mcore_convert import convert, inspect
from mcore_convert.options import LayoutOptions

SMALL: dict[str, Any] = QWEN3_235B | {
    "hidden_size": 32,
    "head_dim": 8,
    "moe_intermediate_size": 16,
    "num_attention_heads": 8,
    "num_experts": 16,
    "num_hidden_layers": 2,
    "vocab_size": 300,
}


SMALL_DEEPSEEK: dict[str, Any] = DEEPSEEK_V3 | {
    "hidden_size": 32,
    "intermediate_size": 32,
    "kv_lora_rank": 8,
    "moe_intermediate_size": 16,
    "n_routed_experts": 16,
    "num_attention_heads": 8,
    "num_hidden_layers": 4,
    "num_key_value_heads": 8,
    "q_lora_rank": 12,
    "vocab_size": 300,
}


def test_the_model_has_the_published_size() -> None:
    assert qwen3_moe_nbytes(QWEN3_235B) == 2 * 235_093_634_560
    assert len(deepseek_shapes(DEEPSEEK_V3)) == 46_183
    assert deepseek_nbytes(DEEPSEEK_V3 | {"num_nextn_predict_layers": 0}) == 2 * 671_026_419_200


def test_a_deepseek_goes_there_and_back(tmp_path: Path) -> None:
    hf = make_deepseek(tmp_path / "hf", SMALL_DEEPSEEK, shards=3)
    for to, layout in {"torch_dist": LayoutOptions(), "torch": DEEPSEEK_LAYOUT}.items():
        write_headers(convert(hf, tmp_path / to, to=to, dry_run=True, **layout).plan.reservation)
        back = convert(tmp_path / to, tmp_path / "back", dry_run=True)
        assert back.plan.family.name == "deepseek_v3"
        assert back.plan.nbytes == deepseek_nbytes(SMALL_DEEPSEEK)


def test_sources_are_whole_but_for_their_values(tmp_path: Path) -> None:
    hf = make_qwen3_moe(tmp_path / "hf", SMALL, shards=3, sparse=True)
    assert inspect(hf).num_parameters == qwen3_moe_nbytes(SMALL) / 2
    layouts: dict[str, LayoutOptions] = {"torch_dist": {}, "torch": LAYOUT}
    for to, layout in layouts.items():
        first = convert(hf, tmp_path / to, to=to, dry_run=True, **layout)
        write_headers(first.plan.reservation)
        assert not list((tmp_path / to).rglob("*.partial"))
        back = convert(tmp_path / to, tmp_path / "back", dry_run=True)
        assert back.plan.family.name == "qwen3_moe"
        assert back.plan.nbytes == qwen3_moe_nbytes(SMALL)
