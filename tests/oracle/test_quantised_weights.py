"""Weights that a run holds in fp8 and saves dequantised: its master copies are near them, and no proof of rounding."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fixtures.fp8 import through_fp8
from fixtures.optimizer import random_state, save_with_optimizer
from mcore_convert import ConvertError, reshard
from mcore_convert.formats.torch_dist.checkpoint import open_torch_dist
from mcore_convert.storage.rounding import Tolerance, are_masters
from tests.oracle.test_megatron_fixtures import ARGS
from tests.oracle.test_remainders import with_args
from tests.ranks import run_ranks
from tests.tensors import dcp_tensors

MODEL: dict[str, Any] = {**ARGS, "vocab_size": 32, "make_vocab_size_divisible_by": 16}
STATE = random_state(MODEL)


def test_masters_near_their_weights_go_along(tmp_path: Path) -> None:
    """Buckets of fp8 parameters lie beside those of the others."""
    save = partial(save_with_optimizer, MODEL, STATE, tmp_path / "run", "dp_reshardable", quantised=True)
    run_ranks(2, lambda: save(tp=2))
    assert any("torch.uint8" in key for key in open_torch_dist(tmp_path / "run").optimizer_keys)
    plan = reshard(tmp_path / "run", tmp_path / "one")
    assert [note for note in plan.notes if "fp8" in note] == [
        "with fp8 master weights do not round to their weights: they are proven to be within 12.5% of each and 0.4% of "
        "the largest"
    ]
    written = dcp_tensors(tmp_path / "one" / "iter_0000010")
    for name, master in STATE.master.items():
        head, separator, tail = name.partition("decoder.layers.")
        layer, _, rest = tail.partition(".")
        key = f"{head}{separator}{rest}" if separator else name
        tensor = written[f"optimizer.state.param.{key}"]
        assert torch.equal(tensor[int(layer)] if separator else tensor, master), name
    run = with_args(tmp_path / "run", tmp_path / "plain", fp8_param_gather=False)
    with pytest.raises(ConvertError):
        reshard(run, tmp_path / "no")


def test_what_was_near_by_chance_is_not_proven() -> None:
    """Values in another order are refused; the sixteenths that e4m3 has between powers of two are not."""
    near = Tolerance("fp8", 1 / 8, 1 / 256)
    values = torch.randn(4096, generator=torch.Generator().manual_seed(5))
    held = through_fp8(values).to(torch.bfloat16)
    bits = held.view(torch.int16).numpy().view(np.uint16)
    assert are_masters(values.numpy().view(np.uint32), bits, "bfloat16", near)
    assert not are_masters(values.numpy().view(np.uint32), bits, "bfloat16")
    assert not are_masters(values.roll(1).numpy().view(np.uint32)[:64], bits[:64], "bfloat16", near)
    assert not are_masters((values * 1.25).numpy().view(np.uint32), bits, "bfloat16", near)


def test_remainders_of_what_was_quantised_are_refused(tmp_path: Path) -> None:
    run_ranks(1, lambda: save_with_optimizer(MODEL, STATE, tmp_path / "run", "dp_reshardable", remainders=True))
    run = with_args(tmp_path / "run", tmp_path / "fp8", fp8_param_gather=True)
    with pytest.raises(ConvertError, match="remainders of weights that were quantised"):
        reshard(run, tmp_path / "out")
