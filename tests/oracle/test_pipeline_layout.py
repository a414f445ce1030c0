"""Pipelines that Megatron Core does not build, though every layer has a place, are refused before a byte is written."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_convert.errors import LayoutError
from mcore_convert.spec import Dims, Layout
from mcore_convert.spec.pipeline_layout import stages_of

DIMS = Dims(
    num_layers=4,
    hidden_size=8,
    ffn_hidden_size=16,
    num_attention_heads=2,
    num_query_groups=2,
    kv_channels=4,
    vocab_size=32,
    padded_vocab_size=32,
    max_position_embeddings=8,
    tied=False,
    qkv_bias=False,
    linear_bias=False,
)


def is_built_by_megatron(layout: Layout, dims: Dims) -> bool:
    """Return whether Megatron Core takes the configuration, and its first rank knows where its layers begin."""
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    try:
        config = TransformerConfig(
            num_layers=dims.num_layers,
            hidden_size=4,
            num_attention_heads=1,
            cuda_graph_scope=[],
            pipeline_dtype=torch.float32,
            mtp_num_layers=dims.mtp_num_layers or None,
            pipeline_model_parallel_size=layout.pp,
            virtual_pipeline_model_parallel_size=layout.vpp,
            num_layers_in_first_pipeline_stage=layout.first_stage_layers,
            num_layers_in_last_pipeline_stage=layout.last_stage_layers,
            pipeline_model_parallel_layout=layout.pipeline_layout,
        )
        if layout.pipeline_layout is None:
            get_transformer_layer_offset(config, vp_stage=0 if layout.vpp else None, pp_rank=layout.pp - 1)
    except (AssertionError, ValueError, ZeroDivisionError):
        return False
    return True


def is_taken(layout: Layout, dims: Dims) -> bool:
    try:
        layout.check(dims)
    except LayoutError:
        return False
    return True


@pytest.mark.parametrize(
    ("text", "mtp"),
    [
        ("Ett|ttL", 0),
        ("tt|tt", 0),
        ("ttE|ttL", 0),
        ("Ett|Ltt", 0),
        ("LEtt|tt", 0),
        ("Ett|EttL", 0),
        ("EttL|ttL", 0),
        ("|Ett|tt|L", 0),
        ("Ett|tt||L", 0),
        ("E||tttt|L", 0),
        ("Ett|ttmL", 1),
        ("Ett|tt|m|L", 1),
        ("Ett|tt,m|t|tL", 1),
        ("Etmt|ttL", 1),
        ("Et|t|ttm|L", 1),
        ("Et|ttm|t|L", 1),
        ("Ett|t|t|mmL", 2),
        ("Ett|tt|m|mL", 2),
    ],
)
def test_a_layout_is_taken_where_megatron_core_takes_it(text: str, mtp: int) -> None:
    layout, dims = Layout(pp=2, pipeline_layout=text), replace(DIMS, mtp_num_layers=mtp)
    assert is_taken(layout, dims) == is_built_by_megatron(layout, dims)


@settings(max_examples=150, deadline=None)
@given(letters=st.permutations("Etttt|||mL"), mtp=st.integers(0, 1))
def test_any_order_of_letters(letters: list[str], mtp: int) -> None:
    text = "".join(letters if mtp else [letter for letter in letters if letter != "m"])
    layout, dims = Layout(pp=2, pipeline_layout=text), replace(DIMS, mtp_num_layers=mtp)
    assert is_taken(layout, dims) == is_built_by_megatron(layout, dims)


@pytest.mark.parametrize(
    "options",
    [
        {"pipeline_layout": "Ett|ttL", "first_stage_layers": 2},
        {"pipeline_layout": "Ett|ttL", "last_stage_layers": 2},
        {"first_stage_layers": 0},
        {"last_stage_layers": 0},
        {"first_stage_layers": 0, "last_stage_layers": 4},
        {"first_stage_layers": 2, "last_stage_layers": 2},
        {"first_stage_layers": 2, "last_stage_layers": 2, "vpp": 2},
        {"first_stage_layers": 2, "vpp": 2},
    ],
    ids=str,
)
def test_uneven_stages_are_taken_where_megatron_core_takes_them(options: dict[str, Any]) -> None:
    layout = Layout(pp=2, **options)
    assert is_taken(layout, DIMS) == is_built_by_megatron(layout, DIMS)


def test_virtual_stages_of_a_layout_need_pipeline_parallelism(alone: None) -> None:
    """Which `initialize_model_parallel` refuses, and not the configuration (`parallel_state.py`)."""
    from megatron.core import parallel_state

    with pytest.raises(LayoutError, match="virtual ones need a pp above 1"):
        Layout(pipeline_layout="Ett|ttL").check(DIMS)
    with pytest.raises(RuntimeError, match="greater than 1 with interleaved schedule"):
        parallel_state.initialize_model_parallel(virtual_pipeline_model_parallel_size=len(stages_of("Ett|ttL")))
    Layout(pipeline_layout="EttttL").check(DIMS)
