"""A whole run through `pretrain`: what it leaves, what it evaluates, a flow of one's own, and the Python API."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_convert.errors import ConvertError
from tests.ranks import run_ranks
from tests.train.test_train_layouts import SAMPLES, batch_of, config_of
from train_entry import Trainer, load_config
from train_entry.config.schema import Config
from train_entry.flows.base import Batch, Loss
from train_entry.pretrain import pretrain
from train_entry.scopes import WORKSPACE, deterministic

SMALL = ["training.seq_length=32", "training.global_batch_size=4", "model.num_layers=2", "logging.tensorboard=false"]


class LastToken:
    """A flow that learns the last token of each sequence only, from logits, and reports how often it is right."""

    def __init__(self, config: Config) -> None:
        self.length = config.training.seq_length

    def forward(self, model: Any, batch: Batch) -> Tensor:
        logits: Tensor = model(batch["tokens"], batch["position_ids"], None)
        return logits

    def loss(self, output: Tensor, batch: Batch) -> Loss:
        logits, labels = output[:, -1].float(), batch["labels"][:, -1]
        losses = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        return Loss(losses, torch.tensor(len(labels)), {"right": (logits.argmax(-1) == labels).sum()})


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_what_a_run_leaves(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    config = load_config(
        "tiny-gpt2",
        [
            *(*SMALL, f"run_dir={run_dir}", "training.steps=7", "training.eval_interval=3", "training.eval_steps=2"),
            *("logging.profile=true", "training.deterministic=true", "checkpoint.save_interval=5"),
        ],
    )
    run_ranks(1, pretrain, config)
    rows = rows_of(run_dir)
    assert [row["iteration"] for row in rows if "valid/loss" not in row and "lr" in row] == list(range(1, 8))
    evaluations = [row for row in rows if "lr" not in row]
    assert len(evaluations) == 4, "valid at 3, 6 and 7, and test at the end"
    assert load_config(str(run_dir)) == config
    assert json.loads((run_dir / "trace-0.json").read_text())["traceEvents"]
    assert sorted(path.name for path in (run_dir / "checkpoints").glob("iter_*")) == ["iter_0000005", "iter_0000007"]
    assert (run_dir / "loss.png").is_file()


@pytest.mark.parametrize("own", [None, ":16:8"])
def test_determinism_costs_only_who_asks_for_it(own: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS's workspace is not named where nobody needs it: that slows every product of matrices down."""
    monkeypatch.delenv(WORKSPACE, raising=False)
    if own is not None:
        monkeypatch.setenv(WORKSPACE, own)
    with deterministic(False):
        assert os.environ.get(WORKSPACE) == own
        assert not torch.are_deterministic_algorithms_enabled()
    with deterministic(True):
        assert os.environ[WORKSPACE] == (own or ":4096:8")
        assert torch.are_deterministic_algorithms_enabled()
    assert os.environ.get(WORKSPACE) == own
    assert not torch.are_deterministic_algorithms_enabled()


def test_an_evaluation_repeats_and_changes_nothing(tmp_path: Path) -> None:
    def evaluated() -> tuple[list[float], list[float]]:
        config = config_of(tmp_path / "run", model={**TINY, "hidden_dropout": 0.5})
        with Trainer(config) as trainer:
            trainer.initialize()
            trainer.setup_model_and_optimizer()
            before = [parameter.clone() for parameter in trainer.state.model[0].parameters()]
            losses = [trainer.evaluate([batch_of(7, 250), batch_of(8, 250)]) for _ in range(2)]
            each = [trainer.evaluate([batch_of(number, 250)]) for number in (7, 8)]
            after = list(trainer.state.model[0].parameters())
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
            return losses, each

    ((losses, each),) = run_ranks(1, evaluated)
    assert losses[0] == losses[1], "dropout is off"
    counts = [float(batch_of(number, 250)["loss_mask"].sum()) for number in (7, 8)]
    assert losses[0] == pytest.approx(sum(a * b for a, b in zip(each, counts, strict=True)) / sum(counts), rel=1e-6)


TINY = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "vocab_size": 250,
}


@pytest.mark.parametrize("parallel", [{}, {"pp": 2}], ids=["dp2", "pp2"])
def test_a_flow_of_ones_own(parallel: dict[str, Any], tmp_path: Path) -> None:
    """Against the same loss of the model's logits, computed here."""

    def run() -> tuple[float, float, float]:
        config = config_of(
            tmp_path / "run",
            model=TINY,
            parallel=parallel,
            training={"flow": f"{__name__}:LastToken"},
        )
        with Trainer(config) as trainer:
            trainer.initialize()
            trainer.setup_model_and_optimizer()
            first = trainer.train(batch_of(0, 250))
            assert isinstance(first.loss, float)
            for _ in range(8):
                last = trainer.train(batch_of(0, 250))
            assert isinstance(last.loss, float)
            return first.loss, last.loss, float(first.extra["right"])

    answers = run_ranks(2, run)
    assert answers[0] == answers[1]
    first, last, right = answers[0]
    assert first == pytest.approx(math.log(250), abs=0.3)
    assert last < first - 0.5
    assert right in [number / SAMPLES for number in range(SAMPLES + 1)]


def test_a_batch_of_another_size_is_refused(tmp_path: Path) -> None:
    def run() -> str:
        with Trainer(config_of(tmp_path / "run", model=TINY)) as trainer:
            trainer.initialize()
            trainer.setup_model_and_optimizer()
            with pytest.raises(ConvertError) as caught:
                trainer.train({name: tensor[:3] for name, tensor in batch_of(0, 250).items()})
            return str(caught.value)

    (text,) = run_ranks(1, run)
    assert f"a batch has {SAMPLES} samples" in text
    assert "`tokens` has 3" in text


def test_new_weights_are_those_of_the_seed_at_every_layout(tmp_path: Path) -> None:
    """Normal, of the spread that Megatron and GPT-2 have, and the same tensors whatever the layout."""

    def weights(parallel: dict[str, Any], seed: int) -> dict[str, Tensor]:
        from mcore_convert.checkpoints.identify import identify
        from mcore_convert.comparison.logits import tensors_of

        run_dir = tmp_path / f"{len(parallel)}-{seed}"
        config = config_of(
            run_dir,
            model={**TINY, "vocab_size": 256},
            parallel=parallel,
            training={"seed": seed},
            checkpoint={"save": True},
        )
        with Trainer(config) as trainer:
            trainer.initialize()
            trainer.setup_model_and_optimizer()
            trainer.save()
        return {name: tensor.clone() for name, tensor in tensors_of(identify(run_dir / "checkpoints"))}

    (one,) = run_ranks(1, weights, {}, 1)
    split = run_ranks(4, weights, {"tp": 2, "pp": 2}, 1)[0]
    (other,) = run_ranks(1, weights, {}, 2)
    assert one.keys() == split.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, split[name]), name
        if tensor.ndim == 2:
            narrow = name.endswith(("linear_proj.weight", "linear_fc2.weight"))
            expected = 0.02 / math.sqrt(2 * 2) if narrow else 0.02
            assert tensor.std().item() == pytest.approx(expected, rel=0.1), name
            assert not torch.equal(tensor, other[name]), name
