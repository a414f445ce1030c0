"""A loss over pairs of rows is the same at every layout and in plain torch; a flow that would change it is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_convert.errors import ConfigError, ConvertError
from tests import pairs
from tests.conftest import HfMaker
from tests.curves import Curve, by_torch, by_trainer
from tests.ranks import run_ranks
from tests.train.test_train_layouts import LR, SAMPLES, batch_of, config_of
from train_entry.config.schema import Config
from train_entry.flows import flow_of
from train_entry.trainer import Trainer

METRICS = ("right", "margin")
CONSTANT = {"style": "constant", "warmup_steps": 0}
# What is not as on one rank, of two: data-parallel ranks unless it says otherwise.
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "dp2-distributed": {"distributed_optimizer": True},
    "cp2": {"cp": 2},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
}
TINY = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "max_position_embeddings": 64, "vocab_size": 250}


def config(run_dir: Path, flow: str = "Pairs", micro: int = 2, **groups: dict[str, Any]) -> Config:
    training = {"flow": f"tests.pairs:{flow}", "micro_batch_size": micro}
    return config_of(run_dir, training=training, schedule=CONSTANT, **groups)


def by_transformers(path: Path) -> Curve:
    """Loss and norm of the gradients of each step, and the last loss, in transformers and torch alone."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path).eval()  # no dropout
    return by_torch(model, lambda batch: [pairs.loss_of_pairs(model, batch)], LR)


def test_a_loss_over_pairs_is_the_same_at_every_layout(hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    path = hf_checkpoint("llama-gqa", fill="normal")
    init = {"init": str(path), "save": False}

    def all_layouts() -> dict[str, Curve]:
        return {
            name: by_trainer(config(tmp_path / name, parallel=parallel, checkpoint=init), METRICS)
            for name, parallel in LAYOUTS.items()
        }

    (alone,) = run_ranks(1, by_trainer, config(tmp_path / "alone", micro=SAMPLES, checkpoint=init), METRICS)
    expected = by_transformers(path)
    assert alone[0][0] != pytest.approx(alone[1][0], abs=0.05), "the steps tell layouts apart"
    for ours, theirs in zip(alone, expected, strict=True):
        assert ours[: len(theirs)] == pytest.approx(theirs, rel=1e-5, abs=1e-5)
    for answer in run_ranks(2, all_layouts):
        assert answer.keys() == LAYOUTS.keys()
        for name, result in answer.items():
            for ours, theirs in zip(result, alone, strict=True):
                assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5), name


# A flow, its rows in a microbatch and the layout at which its loss would be another one; None: nothing is wrong there.
REFUSED: list[tuple[str, int, dict[str, Any], str | None]] = [
    ("Torn", 1, {"tp": 2}, "one by one"),
    ("Torn", 2, {}, "one by one"),
    ("Torn", SAMPLES, {"tp": 2}, None),
    ("Mean", 2, {"pp": 2}, "one by one"),
    ("PartsOnly", 2, {"cp": 2}, "the parts that context parallelism has"),
    ("PartsOnly", 2, {"tp": 2}, None),
    ("WithoutGradient", 2, {"cp": 2}, "gradient"),
    ("Mixed", 2, {"cp": 2}, "the parts that context parallelism has"),
    ("Mixed", 2, {}, None),
]


def test_a_flow_whose_loss_depends_on_the_layout_is_refused(tmp_path: Path) -> None:
    def refusals() -> list[str | None]:
        texts: list[str | None] = []
        for flow, micro, parallel, _ in REFUSED:
            with Trainer(config(tmp_path / "run", flow, micro, parallel=parallel, model=TINY)) as trainer:
                trainer.initialize()
                trainer.setup_model_and_optimizer()
                before = [parameter.clone() for parameter in trainer.state.model[0].parameters()]
                try:
                    trainer.train(batch_of(0, 250))
                    texts.append(None)
                except ConvertError as error:
                    texts.append(str(error))
                    after = trainer.state.model[0].parameters()
                    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        return texts

    for answer in run_ranks(2, refusals):
        for (flow, _, _, words), text in zip(REFUSED, answer, strict=True):
            if words is None:
                assert text is None, flow
            else:
                assert text is not None, flow
                assert f"the loss of the flow `{flow}` is another one" in text
                assert words in text


@pytest.mark.parametrize(("micro", "hint"), [(1, "set it to 2"), (3, "set it to 4")])
def test_microbatches_that_tear_pairs_apart_are_refused(micro: int, hint: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"`training.micro_batch_size` = {micro} is no multiple of 2(.|\n)*{hint}"):
        flow_of(config(tmp_path, micro=micro))


def test_packed_examples_are_no_pairs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"set `data.packed` to false"):
        flow_of(config(tmp_path, data={"kind": "sft"}))
