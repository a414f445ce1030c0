"""Flows: the loss is the one that transformers computes of the same labels, and a user's own flow is found."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_convert.checkpoints.identify import Model, identify
from mcore_convert.comparison.logits import tensors_of
from mcore_convert.errors import ConfigError
from mcore_convert.megatron.model import build_model
from mcore_convert.megatron.parallel import single_process
from mcore_convert.megatron.weights import load_weights
from tests.conftest import HfMaker
from train_entry.config.schema import Config
from train_entry.flows import FineTuning, Flow, Pretraining, flow_of
from train_entry.flows.fine_tuning import segment_mask

VOCABULARY, LENGTH = 300, 32
IGNORED = -100  # a label that transformers takes no loss of

# Examples in a sequence, by their lengths: (places, of which the last so many are learned). The rest is padding.
PACKED = [[(10, 4), (7, 1), (12, 12)], [(32, 20)]]
PADDED = [[(10, 4)], [(32, 20)]]


def batch_of(layout: list[list[tuple[int, int]]], seed: int) -> tuple[dict[str, Tensor], list[tuple[Tensor, Tensor]]]:
    """Return a batch of examples of random tokens, and each example alone: inputs,
    and labels as transformers takes them.
    """
    random = torch.Generator().manual_seed(seed)
    samples, examples = [], []
    for row in layout:
        sample = {
            "tokens": torch.zeros(LENGTH, dtype=torch.int64),
            "labels": torch.zeros(LENGTH, dtype=torch.int64),
            "loss_mask": torch.zeros(LENGTH),
            "position_ids": torch.arange(LENGTH),
            "segment_ids": torch.zeros(LENGTH, dtype=torch.int64),
        }
        at = 0
        for number, (places, learned) in enumerate(row, start=1):
            text = torch.randint(VOCABULARY, (places + 1,), generator=random)
            here = slice(at, at + places)
            sample["tokens"][here], sample["labels"][here] = text[:-1], text[1:]
            sample["loss_mask"][at + places - learned : at + places] = 1
            sample["position_ids"][here] = torch.arange(places)
            sample["segment_ids"][here] = number
            target = text.clone()
            target[: places + 1 - learned] = IGNORED
            examples.append((text[None], target[None]))
            at += places
        samples.append(sample)
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}, examples


def by_transformers(path: Path, examples: list[tuple[Tensor, Tensor]]) -> tuple[float, dict[str, Tensor]]:
    """Return the mean loss over all learned tokens, each example alone; and its gradient in the embedding."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    counts = [int((target != IGNORED).sum()) for _, target in examples]
    total = torch.stack(
        [model(text, labels=target).loss * count for (text, target), count in zip(examples, counts, strict=True)]
    ).sum()
    loss = total / sum(counts)
    loss.backward()
    return float(loss.detach()), {"embedding": model.get_input_embeddings().weight.grad}


def by_megatron(model: Model, flow: Flow, batch: Mapping[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    with single_process():
        network = build_model({**model.args, "padded_vocab_size": model.dims.vocab_size})
        load_weights(network, tensors_of(model))
        network.requires_grad_(True)
        loss = flow.loss(flow.forward(network, dict(batch)), dict(batch))
        (loss.total / loss.count).backward()
        assert loss.count == batch["loss_mask"].sum()
        return float(loss.total.detach() / loss.count), {"embedding": network.embedding.word_embeddings.weight.grad}


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa"])
@pytest.mark.parametrize("kind", ["pretraining", "padded", "packed"])
def test_the_loss_is_that_of_transformers(name: str, kind: str, hf_checkpoint: HfMaker) -> None:
    """Packed examples too, although transformers sees each of them alone."""
    path = hf_checkpoint(name, fill="normal")
    batch, examples = batch_of({"pretraining": [[(32, 32)]] * 2, "padded": PADDED, "packed": PACKED}[kind], seed=3)
    if kind != "packed":
        del batch["segment_ids"]
    flow: Flow = Pretraining(Config()) if kind == "pretraining" else FineTuning(Config())
    loss, gradients = by_megatron(identify(path), flow, batch)
    expected, of_transformers = by_transformers(path, examples)
    assert loss == pytest.approx(expected, abs=1e-5)
    torch.testing.assert_close(gradients["embedding"], of_transformers["embedding"], atol=2e-6, rtol=1e-4)


def test_half_precision_sums_in_full(hf_checkpoint: HfMaker) -> None:
    """bfloat16 losses would not add up beyond 256."""
    losses = torch.full((4, 256), 2.0, dtype=torch.bfloat16)
    loss = Pretraining(Config()).loss(losses, {"loss_mask": torch.ones(4, 256)})
    assert (loss.total.dtype, float(loss.total), int(loss.count)) == (torch.float32, 2048.0, 1024)


def test_the_mask_of_segments() -> None:
    segments = torch.tensor([[1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 1, 1]])
    mask = segment_mask(segments)
    assert mask.shape == (2, 1, 6, 6)
    for sample, row, column in torch.cartesian_prod(torch.arange(2), torch.arange(6), torch.arange(6)).tolist():
        sees = column <= row and segments[sample, row] == segments[sample, column]
        assert mask[sample, 0, row, column].item() is not bool(sees)


OWN = """
from train_entry.flows import Pretraining

class Halved(Pretraining):
    def __init__(self, config):
        self.rate = config.optimizer.lr

class NoLoss:
    def __init__(self, config): ...
    def forward(self, model, batch): ...

function = len
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory to start a run in, with a module of flows that is on no path."""
    (tmp_path / "own_flows.py").write_text(OWN)
    (tmp_path / "needs_more.py").write_text("import nowhere_to_be_found")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("own_flows", "needs_more"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def config_of(**values: Any) -> Config:
    return Config().with_values(training=values)


def test_the_flow_of_a_run(here: Path) -> None:
    for kind, flow in {"mock": Pretraining, "indexed": Pretraining, "sft": FineTuning}.items():
        assert type(flow_of(Config().with_values(data={"kind": kind}))) is flow
    own = flow_of(Config().with_values(training={"flow": "own_flows:Halved"}, optimizer={"lr": 0.5}))
    assert (type(own).__name__, own.rate) == ("Halved", 0.5)  # type: ignore[attr-defined]
    assert type(flow_of(config_of(flow="train_entry.flows.fine_tuning:FineTuning"))) is FineTuning


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("own_flows", "names no class"),
        ("own_flows:", "names no class"),
        ("other_flows:Halved", "there is no module `other_flows`"),
        ("own_flows.dpo:Halved", "there is no module `own_flows.dpo`"),
        ("own_flows:Doubled", "`own_flows` has no class `Doubled`"),
        ("own_flows:function", "`own_flows` has no class `function`"),
        ("own_flows:NoLoss", "is no flow\n  it has no method `loss`"),
    ],
)
def test_what_is_no_flow(named: str, message: str, here: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        flow_of(config_of(flow=named))
    assert f"`{named}`" in str(refused.value)
    assert message in str(refused.value)


def test_what_a_flow_needs_is_not_blamed_on_its_name(here: Path) -> None:
    with pytest.raises(ModuleNotFoundError, match="nowhere_to_be_found"):
        flow_of(config_of(flow="needs_more:Flow"))
