"""Latent attention of releases up to 0.13: YaRN takes the positions of the run for the original ones.

Megatron Core 0.11 to 0.13 (`multi_latent_attention.py`) gives `max_position_embeddings` to `YarnRotaryEmbedding`, and
scales scores of attention by `mscale`; since 0.14 there are `original_max_position_embeddings`, and `mscale_all_dim`.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from converters import deepseek_v3
from fixtures.hf import CONFIGS
from mcore_convert.spec.config.arguments import normalise
from mcore_convert.spec.config.latent import has_original_positions

CONFIG: dict[str, Any] = json.loads((CONFIGS / "deepseek_v3.json").read_text())
OLD = {"dist_ckpt_strictness": "assume_ok_unexpected", "inprocess_restart": False}  # which 0.13 stores
YOUNG = {**OLD, "full_validation": False}  # and 0.14 beside them
NOT_STORED = ("original_max_position_embeddings", "beta_fast", "beta_slow", "rope_type")


def stored(release: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return the arguments that a run of a release stores, scaled by YaRN over 64 positions."""
    args = deepseek_v3.CONFIG.to_megatron(CONFIG)
    args = {name: value for name, value in args.items() if name not in NOT_STORED}
    scaled = {"max_position_embeddings": 64, "rotary_scaling_factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    return {**args, **scaled, **release, **changes}


def scaling_of(args: dict[str, Any]) -> dict[str, Any]:
    scaling: dict[str, Any] = deepseek_v3.CONFIG.to_hf(normalise(args))["rope_scaling"]
    return scaling


@pytest.mark.parametrize(("release", "positions"), [(OLD, 64), (YOUNG, 4096), ({}, 4096)])
def test_original_positions_are_those_of_the_release_that_wrote_the_run(
    release: dict[str, Any], positions: int
) -> None:
    scaling = scaling_of(stored(release))
    assert scaling["original_max_position_embeddings"] == positions
    assert (scaling["mscale"], scaling["mscale_all_dim"]) == (1.0, 1.0)
    once = normalise(stored(release))
    assert normalise(once) == once


def test_scores_that_an_old_release_scales_alone_are_refused() -> None:
    args = stored(OLD, mscale_all_dim=0.0)
    [line] = deepseek_v3.CONFIG.refusals(normalise(args))
    assert "`mscale` = 1.0 beside `mscale_all_dim` = 0.0: Megatron Core up to 0.13" in line
    assert "mscale" not in scaling_of(stored(YOUNG, mscale_all_dim=0.0))
    assert not deepseek_v3.CONFIG.refusals(normalise(stored(OLD, mscale_all_dim=0.0, rotary_scaling_factor=1.0)))


@pytest.mark.parametrize(
    ("changes", "is_own"),
    [
        ({}, True),  # 4096 of 64
        ({"max_position_embeddings": 4096}, False),
        ({"max_position_embeddings": 4096, "mscale_all_dim": 0.0}, True),
        ({"rotary_scaling_factor": 1.0}, False),
        ({"rope_type": "rope", "mscale_all_dim": 0.0}, False),
        ({"multi_latent_attention": False}, False),
    ],
)
def test_what_an_old_release_cannot_be_told_is_known(changes: dict[str, Any], is_own: bool) -> None:
    assert has_original_positions(normalise(stored(YOUNG, **changes))) is is_own
