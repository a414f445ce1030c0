"""Training follows the same curve at every layout, and the curve is the one that transformers and torch compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conftest import HfMaker
from tests.ranks import run_ranks
from tests.wide import matrix
from train_entry.config.schema import Config
from train_entry.trainer import Trainer

LENGTH, SAMPLES, STEPS = 64, 4, 4  # steps of the warmup, and of the decay after it
LR, MIN_LR, WARMUP, DECAY, WEIGHT_DECAY = 3e-3, 3e-4, 2, 20, 0.1
MODELS = ("gpt2", "llama-gqa")

# Ranks, and what is not as on one rank. Micro batches are of one sample: gradients accumulate everywhere.
DISTRIBUTED = {"distributed_optimizer": True}
OVERLAP = {**DISTRIBUTED, "overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 9999}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tp": 2}),
    "pp2": (2, {"pp": 2}),
    "tp2-pp2": (4, {"tp": 2, "pp": 2}),
    "pp2-vpp2": (2, {"pp": 2, "vpp": 2}),
    "tp2-sp": (2, {"tp": 2, "sequence_parallel": True}),
    "cp2": (2, {"cp": 2}),
    "dp2-distributed": (2, DISTRIBUTED),
    "dp2-overlap": (2, OVERLAP),
    "dp2-pp2-vpp2-overlap": (4, {"pp": 2, "vpp": 2, **OVERLAP}),
}


def config_of(run_dir: Path, **groups: dict[str, Any]) -> Config:
    config = Config(run_dir=run_dir).with_values(
        training={"seq_length": LENGTH, "global_batch_size": SAMPLES, "micro_batch_size": 1, "steps": DECAY},
        optimizer={"lr": LR, "min_lr": MIN_LR, "weight_decay": WEIGHT_DECAY},
        schedule={"warmup_steps": WARMUP},
        checkpoint={"save": False},
        logging={"tensorboard": False, "plot": False},
    )
    return config.with_values(**groups)


def batch_of(step: int, vocab_size: int) -> dict[str, Tensor]:
    """Tokens that mostly follow a rule, and the tokens that come next; a tenth of them count in no loss."""
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(vocab_size, (SAMPLES, 1), generator=generator)
    text = (start + 5 * torch.arange(LENGTH + 1)) % vocab_size
    noise = torch.randint(vocab_size, text.shape, generator=generator)
    text = torch.where(torch.rand(text.shape, generator=generator) < 0.2, noise, text)
    return {
        "tokens": text[:, :-1].contiguous(),
        "labels": text[:, 1:].contiguous(),
        "loss_mask": (torch.rand(SAMPLES, LENGTH, generator=generator) < 0.9).float(),
        "position_ids": torch.arange(LENGTH).expand(SAMPLES, LENGTH).contiguous(),
    }


def run(config: Config) -> list[tuple[float, float, float]]:
    """Loss, norm of the gradients and learning rate of each step, and the loss of two more batches at the end."""
    with Trainer(config) as trainer:
        trainer.initialize()
        trainer.setup_model_and_optimizer()
        vocab_size = trainer.args["vocab_size"]
        steps = []
        for number in range(STEPS):
            lr = trainer.lr
            metrics = trainer.train(batch_of(number, vocab_size))
            assert isinstance(metrics.loss, float)
            assert isinstance(metrics.grad_norm, float)
            steps.append((metrics.loss, metrics.grad_norm, lr))
        return [*steps, (trainer.evaluate([batch_of(100, vocab_size), batch_of(101, vocab_size)]), 0.0, 0.0)]


def transformers_curve(path: Path) -> list[tuple[float, float, float]]:
    """Return the same in transformers and torch alone: a loop that knows nothing of Megatron."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)

    def loss_of(batch: dict[str, Tensor]) -> Tensor:
        logits = model(batch["tokens"]).logits
        losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none")
        return (losses * batch["loss_mask"]).sum() / batch["loss_mask"].sum()

    steps = []
    for number in range(STEPS):
        done = torch.tensor((number - WARMUP) / (DECAY - WARMUP))
        cosine = MIN_LR + (LR - MIN_LR) * float(0.5 * (1 + torch.cos(torch.pi * done)))
        lr = LR * number / WARMUP if number < WARMUP else cosine
        for group in optimizer.param_groups:
            group["lr"] = lr
        loss = loss_of(batch_of(number, model.config.vocab_size))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        steps.append((loss.item(), float(norm), lr))
    with torch.no_grad():
        model.eval()
        batches = [batch_of(number, model.config.vocab_size) for number in (100, 101)]
        counts = [float(batch["loss_mask"].sum()) for batch in batches]
        total = sum(float(loss_of(batch)) * count for batch, count in zip(batches, counts, strict=True))
    return [*steps, (total / sum(counts), 0.0, 0.0)]


@pytest.fixture(scope="module")
def curve(hf_checkpoint: HfMaker, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`curve(name)`: that of one rank, from a Hugging Face model."""
    made: dict[str, Any] = {}

    def of(name: str) -> Any:
        if name not in made:
            init = str(hf_checkpoint(name, fill="normal"))
            (made[name],) = run_ranks(1, run, config_of(tmp_path_factory.mktemp(name), checkpoint={"init": init}))
        return made[name]

    return of


@pytest.mark.parametrize("name", MODELS)
def test_one_rank_trains_as_transformers_and_torch_do(name: str, curve: Any, hf_checkpoint: HfMaker) -> None:
    expected = transformers_curve(hf_checkpoint(name, fill="normal"))
    for ours, theirs in zip(curve(name), expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize(
    ("name", "count"),
    matrix(
        ((name, count) for name in MODELS for count in (2, 4)),
        thin=lambda name, count: name == "llama-gqa" or count == 4,
    ),
)
def test_every_layout_follows_the_curve_of_one_rank(
    name: str, count: int, curve: Any, hf_checkpoint: HfMaker, tmp_path: Path
) -> None:
    """Those of so many ranks one after the other, on the same ranks."""
    checkpoint = {"init": str(hf_checkpoint(name, fill="normal")), "save": False}
    layouts = {layout: parallel for layout, (ranks, parallel) in LAYOUTS.items() if ranks == count}

    def all_layouts() -> dict[str, list[tuple[float, float, float]]]:
        return {
            layout: run(config_of(tmp_path / layout, parallel=parallel, checkpoint=checkpoint))
            for layout, parallel in layouts.items()
        }

    for answer in run_ranks(count, all_layouts):
        assert answer.keys() == layouts.keys()
        for layout, result in answer.items():
            for ours, theirs in zip(result, curve(name), strict=True):
                assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5), layout
