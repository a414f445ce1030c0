"""The sizes of models with linear attention or Mamba mixers, and which of their layers have these."""

from __future__ import annotations

from typing import Any

import pytest

from converters import nemotron_h, qwen3_5, qwen3_next
from mcore_convert.spec import Dims, Family
from mcore_convert.spec.config.arguments import normalise
from mcore_convert.spec.config.linear import pattern_of
from mcore_convert.spec.layers import ATTENTION, LINEAR
from mcore_convert.spec.shard import Box

FULL, OTHER = "full_attention", "linear_attention"


def dims_of(family: Family, **config: Any) -> Dims:
    args = normalise(family.config.to_megatron({"model_type": family.config.model_type, **config}))
    return Dims.of(args, vocab_size=args["vocab_size"], padded_vocab_size=args["vocab_size"])


def test_qwen3_next_has_the_published_size() -> None:
    """What the Hub counts in the files of Qwen3-Coder-Next, which have no layer that predicts tokens."""
    family, dims = qwen3_next.FAMILY, dims_of(qwen3_next.FAMILY)
    sizes = [(row, Box.whole(family.shape(row, dims)).numel) for row, _ in family.instances(dims)]
    assert sum(size for row, size in sizes if not row.predicts) == 79_674_391_296
    assert any(row.predicts for row, _ in sizes)


def test_every_fourth_layer_is_another() -> None:
    dims = dims_of(qwen3_next.FAMILY)
    assert dims.layers_with(ATTENTION) == list(range(3, 48, 4))
    assert len(dims.layers_with(LINEAR)) == 36
    assert not dims.stacked


@pytest.mark.parametrize(
    ("kinds", "frequency"),
    [
        ([OTHER, FULL, OTHER], 2),
        ([FULL, OTHER, FULL], [0, 1, 0]),
        ([OTHER, FULL, OTHER, FULL], 2),
        ([FULL, FULL], 1),
        ([OTHER, OTHER], [1, 1]),
    ],
)
def test_a_pattern_goes_there_and_back(kinds: list[str], frequency: Any) -> None:
    config = {"model_type": "qwen3_5_text", "num_hidden_layers": len(kinds), "layer_types": kinds}
    args = normalise(qwen3_5.CONFIG.to_megatron(config))
    assert args["linear_attention_freq"] == frequency
    assert args["mtp_num_layers"] == (1 if kinds[-1] == FULL else None)
    written = qwen3_5.CONFIG.to_hf(args)
    assert written["layer_types"] == kinds
    without = {**written, "layer_types": None}
    if isinstance(frequency, int):
        assert pattern_of(without) == [kind == OTHER for kind in kinds]


NANO_2 = {"hidden_size": 5120, "num_attention_heads": 40, "intermediate_size": 20480, "mamba_head_dim": 80}
NANO_3 = {"hidden_size": 2688, "num_key_value_heads": 2, "mamba_num_heads": 64, "n_routed_experts": 128}
NANO_3 |= {"num_experts_per_tok": 6, "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712}


@pytest.mark.parametrize(
    ("config", "pattern", "billions"),
    [
        ({}, "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", 8.1),  # Nemotron-H 8B
        (NANO_2, "M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M-", 12.31),
        (NANO_3, "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", 31.58),
    ],
)
def test_hybrids_have_the_published_sizes(config: dict[str, Any], pattern: str, billions: float) -> None:
    family, dims = nemotron_h.FAMILY, dims_of(nemotron_h.FAMILY, hybrid_override_pattern=pattern, **config)
    sizes = (Box.whole(family.shape(row, dims)).numel for row, _ in family.instances(dims))
    assert round(sum(sizes) / 1e9, 1 if billions == 8.1 else 2) == billions
