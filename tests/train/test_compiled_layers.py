"""Compiled layers train as others do."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ranks import run_ranks
from tests.train.test_train_model import CPU, LLAMA, TOKENS
from train_entry.config.schema import Config
from train_entry.model.compiled import compiler_missing
from train_entry.trainer import Trainer


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The curve of layers as they are, on one rank."""
    [(curve, _)] = run_ranks(1, _curve, tmp_path_factory.mktemp("plain"), {"compile": "none"}, {})
    assert curve[0] - curve[-1] > 0.1  # it learns, and would not with parameters of the step before
    return curve


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.wide), True])
def test_compiled_layers_train_as_others(
    overlap: bool, plain: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a forward pass gathers its parameters as it goes: a graph must not keep its first waiting."""
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")  # a rank would leave its other compilers behind
    if missing := compiler_missing(CPU):
        pytest.skip(missing)
    groups = {"distributed_optimizer": True, "overlap_grad_reduce": True, "bucket_size": 999}
    layout = {**groups, "overlap_param_gather": True} if overlap else {"tp": 2, "sequence_parallel": True}
    recompute = "none" if overlap else "full"
    for curve, breaks in run_ranks(2, _curve, tmp_path, {"compile": "layers", "recompute": recompute}, layout):
        assert curve == pytest.approx(plain, abs=1e-5)
        assert breaks == 0


def _curve(run_dir: Path, training: dict[str, Any], parallel: dict[str, Any]) -> tuple[list[float], int]:
    """Return the loss of each step, and how often a layer left its graph."""
    from torch._dynamo.utils import counters

    counters.clear()
    fields = {
        name: value for name, value in LLAMA.items() if name not in ("group_query_attention", "padded_vocab_size")
    }
    config = Config(run_dir=run_dir).with_values(
        model={**fields, "make_vocab_size_divisible_by": 2},
        training={"seq_length": TOKENS, "global_batch_size": 4, "steps": 20, **training},
        optimizer={"lr": 1e-2},
        parallel=parallel,
        checkpoint={"save": False, "resume": False},
        logging={"tensorboard": False, "plot": False},
    )
    with Trainer(config) as trainer, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the compiler's, of itself
        trainer.initialize()
        trainer.setup_model_and_optimizer()
        curve = [float(trainer.train(_batch(step)).loss) for step in range(6)]
    return curve, sum(counters["graph_break"].values())


def _batch(step: int) -> dict[str, Tensor]:
    tokens = (torch.arange(4)[:, None] + step + 7 * torch.arange(TOKENS + 1)) % 60
    return {
        "tokens": tokens[:, :-1].contiguous(),
        "labels": tokens[:, 1:].contiguous(),
        "loss_mask": torch.ones(4, TOKENS),
        "position_ids": torch.arange(TOKENS).expand(4, TOKENS).contiguous(),
    }
