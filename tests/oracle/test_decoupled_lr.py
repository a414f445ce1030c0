"""A learning rate of its own for the embedding and the output layer: a group of parameters more, which goes along."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fixtures.mp_rank import save_mp_rank
from fixtures.optimizer import random_state, save_with_optimizer
from mcore_convert import reshard, verify
from mcore_convert.formats.mp_rank.directory import open_mp_rank
from mcore_convert.formats.torch_dist.checkpoint import open_torch_dist
from tests.oracle.test_megatron_fixtures import ARGS
from tests.ranks import run_ranks

MODEL: dict[str, Any] = {**ARGS, "vocab_size": 32, "make_vocab_size_divisible_by": 16, "decoupled_lr": 3e-4}


@pytest.mark.parametrize(("form", "to"), [("dp_reshardable", "torch_dist"), ("plain", "torch")])
def test_its_group_goes_along(form: Any, to: str, tmp_path: Path) -> None:
    state = random_state(MODEL)
    if to == "torch":
        run_ranks(2, lambda: save_mp_rank(MODEL, state, tmp_path / "run", optimizer=form, tp=2, dtype=torch.bfloat16))
    else:
        run_ranks(2, lambda: save_with_optimizer(MODEL, state, tmp_path / "run", form, tp=2))
    reshard(tmp_path / "run", tmp_path / "one", pp=2)
    for path in (tmp_path / "run", tmp_path / "one"):
        training = (open_mp_rank(path) if to == "torch" else open_torch_dist(path)).training
        assert training is not None
        groups = [(group["wd_mult"], group["max_lr"]) for group in training.groups]
        assert sorted(groups) == [(0.0, 1e-3), (1.0, 3e-4), (1.0, 1e-3)]
    reshard(tmp_path / "one", tmp_path / "back", tp=2)
    assert verify(tmp_path / "run", tmp_path / "back").equal
    for name in ("mp_rank_00", "mp_rank_01") if to == "torch" else ():  # as Megatron Core itself has dealt them out
        there, back = (
            torch.load(tmp_path / run / "iter_0000010" / name / "model_optim_rng.pt", weights_only=False)["optimizer"]
            for run in ("run", "back")
        )
        assert [len(group) for group in there["fp32_from_fp16_params"]] == [16, 2, 9]
        for mine, other in zip(back["fp32_from_fp16_params"], there["fp32_from_fp16_params"], strict=True):
            assert all(torch.equal(*pair) for pair in zip(mine, other, strict=True))
        for number, kept in there["optimizer"]["state"].items():
            assert torch.equal(back["optimizer"]["state"][number]["exp_avg"], kept["exp_avg"])
