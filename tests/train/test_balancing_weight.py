"""The balancing losses of experts weigh what their coefficients say, whatever a flow counts: against plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ranks import run_ranks
from tests.train.test_train_layouts import LENGTH, SAMPLES, batch_of, config_of
from train_entry.flows import Batch, Loss, Pretraining, sum_over_sequence
from train_entry.trainer import Trainer

EXPERTS, TOPK = 4, 2
BALANCING = {"moe_aux_loss_coeff": 0.3, "moe_z_loss_coeff": 0.2}
MODEL = {
    "num_layers": 1,
    "hidden_size": 16,
    "ffn_hidden_size": 32,
    "num_attention_heads": 2,
    "vocab_size": 250,
    "max_position_embeddings": LENGTH,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "num_experts": EXPERTS,
    "moe_router_topk": TOPK,
    "moe_ffn_hidden_size": 32,
    **BALANCING,
}
LAYOUTS: dict[str, dict[str, Any]] = {"dp2": {}, "cp2": {"cp": 2}, "tp2": {"tp": 2, "sequence_parallel": True}}


class Silent(Pretraining):
    """A loss without a gradient, that counts every token: what is learned is the balance of the experts alone."""

    def loss(self, output: Tensor, batch: Batch) -> Loss:
        return Loss(0.0 * output.sum(), torch.tensor(output.numel()))


class SilentPairs(Silent):
    """The same, counted in pairs of rows."""

    rows_per_sample = 2

    def loss(self, output: Tensor, batch: Batch) -> Loss:
        sums = sum_over_sequence(0.0 * output)
        return Loss(sums.sum(), torch.tensor(len(sums) // 2))


class SilentRows(Silent):
    """The same, counted in rows."""

    counts_samples = True

    def loss(self, output: Tensor, batch: Batch) -> Loss:
        sums = sum_over_sequence(0.0 * output)
        return Loss(sums.sum(), torch.tensor(len(sums)))


def moved(run_dir: Path, flow: str, parallel: dict[str, Any]) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return the router before a step of gradient descent, what the step subtracts, and what the router was given."""
    config = config_of(
        run_dir,
        model=MODEL,
        parallel=parallel,
        training={"flow": f"tests.train.test_balancing_weight:{flow}", "micro_batch_size": 2},
        optimizer={"name": "sgd", "lr": 1.0, "min_lr": 1.0, "weight_decay": 0.0, "clip_grad": 0.0, "momentum": 0.0},
        schedule={"style": "constant", "warmup_steps": 0},
    )
    with Trainer(config) as trainer:
        trainer.initialize()
        trainer.setup_model_and_optimizer()
        (router,) = (each for name, each in trainer.state.model[0].named_modules() if name.endswith("mlp.router"))
        given: list[Tensor] = []
        router.register_forward_pre_hook(lambda _, inputs: given.append(inputs[0].detach().clone()))
        before = router.weight.detach().clone()
        trainer.train(batch_of(0, 250))
        return before, before - router.weight.detach(), given


def by_torch(weight: Tensor, microbatches: list[Tensor]) -> Tensor:
    """Return the gradient of the mean, over microbatches, of the loss of Switch Transformers and the z-loss of
    ST-MoE.
    """
    leaf = weight.double().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for given in microbatches:
        logits = given.double().reshape(-1, given.shape[-1]) @ leaf.T
        chosen = torch.zeros_like(logits).scatter(1, logits.topk(TOPK).indices, 1.0)
        shares, probabilities = chosen.mean(0) / TOPK, logits.softmax(-1).mean(0)
        balance = EXPERTS * (shares * probabilities).sum()
        total = total + BALANCING["moe_aux_loss_coeff"] * balance
        total = total + BALANCING["moe_z_loss_coeff"] * logits.logsumexp(-1).square().mean()
    (total / len(microbatches)).backward()
    assert leaf.grad is not None
    return leaf.grad.float()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Tensor:
    ((before, step, given),) = run_ranks(1, moved, tmp_path_factory.mktemp("tokens"), "Silent", {})
    assert [len(each.reshape(-1, 16)) for each in given] == [2 * LENGTH] * (SAMPLES // 2)
    result = by_torch(before, given)
    assert float(result.norm()) > 1e-3
    torch.testing.assert_close(step, result, rtol=1e-4, atol=1e-6)
    return result


@pytest.mark.parametrize("flow", ["SilentPairs", "SilentRows"])
def test_balance_is_weighed_alike_by_flows_that_count_samples(flow: str, expected: Tensor, tmp_path: Path) -> None:
    def everywhere() -> list[Tensor]:
        return [moved(tmp_path / name, flow, parallel)[1] for name, parallel in LAYOUTS.items()]

    ((_, alone, _),) = run_ranks(1, moved, tmp_path / "alone", flow, {})
    for name, result in [("alone", alone), *zip(LAYOUTS, run_ranks(2, everywhere)[0], strict=True)]:
        assert torch.allclose(result, expected, rtol=1e-4, atol=1e-6), name
