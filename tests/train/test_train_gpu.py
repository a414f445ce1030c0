"""Training on GPUs: kernels against computations in fp64, and the same curve at every layout. Skipped without CUDA."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from benchmarks.train import as_megatron
from tests.train.test_train_model import attention_of, config_of, rows_of
from train_entry.config.schema import Config
from train_entry.flows.fine_tuning import segment_mask
from train_entry.initialize import process_group
from train_entry.model.attention import SdpaAttention
from train_entry.model.loss import vocab_parallel_cross_entropy
from train_entry.model.operations import swiglu
from train_entry.trainer import Trainer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

STEPS, LENGTH, SAMPLES, WORDS = 10, 256, 8, 512
OVERLAP = {
    "distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "bucket_size": 9999,
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2-overlap": OVERLAP,
    "tp2-sp": {"tp": 2, "sequence_parallel": True},
    "pp2-vpp2": {"pp": 2, "vpp": 2},
    "cp2": {"cp": 2},
    "experts-ep2": {**OVERLAP, "ep": 2},
    "experts-tp2-sp-ep2": {"tp": 2, "sequence_parallel": True, "ep": 2},
}
EXPERTS = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 256, "moe_aux_loss_coeff": 0.01}


@pytest.mark.parametrize("words", [50304, 50257])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weighted", [False, True])
def test_loss_kernels(words: int, dtype: torch.dtype, weighted: bool) -> None:
    logits = (4 * torch.randn(70, 3, 50304, device="cuda")).to(dtype)
    labels = torch.randint(words, (70, 3), device="cuda")
    weights = torch.rand(70, 3, device="cuda") if weighted else 1  # the gradient of a sum is one number for all tokens
    ours, theirs = (logits.clone().requires_grad_() for _ in range(2))
    expected = functional.cross_entropy(theirs.float()[..., :words].flatten(0, 1), labels.flatten(), reduction="none")
    (expected.view(70, 3) * weights).sum().backward()
    result = vocab_parallel_cross_entropy(ours * 1, labels, vocab_size=words, fused=True)
    (result * weights).sum().backward()
    assert float((result.flatten() - expected).abs().max()) < 1e-5
    assert ours.grad is not None
    assert theirs.grad is not None
    # in bf16 a few elements round the other way
    tolerance = 1e-6 if dtype == torch.float32 else 1e-4
    assert float((ours.grad - theirs.grad).float().norm() / theirs.grad.float().norm()) < tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [8192, 1000])
def test_gated_activation_kernels(dtype: torch.dtype, width: int) -> None:
    hidden = (3 * torch.randn(50, 3, 2 * width, device="cuda")).to(dtype).requires_grad_()
    gradient = torch.randn(50, 3, width, device="cuda", dtype=dtype)
    wide = hidden.detach().double().requires_grad_()
    expected = functional.silu(wide[..., :width]) * wide[..., width:]
    result = swiglu(hidden)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    assert float((result - expected).norm() / expected.norm()) < tolerance
    (of_result,) = torch.autograd.grad(result, hidden, gradient)
    (of_expected,) = torch.autograd.grad(expected, wide, gradient.double())
    assert float((of_result - of_expected).norm() / of_expected.norm()) < tolerance


def qkv(tokens: int, groups: int, channels: int, dtype: torch.dtype) -> list[Tensor]:
    shapes = [(tokens, 2, each, channels) for each in (8, groups, groups)]
    return [torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for shape in shapes]


def attended(inputs: list[Tensor], mask: Tensor | None, **fields: Any) -> list[Tensor]:
    """Return the output of our attention, and the gradients of its inputs."""
    channels, groups = inputs[0].size(3), inputs[1].size(2)
    config = config_of(hidden_size=8 * channels, num_attention_heads=8, num_query_groups=groups, **fields)
    output = attention_of(SdpaAttention, config, tp=SimpleNamespace(size=lambda: 1))(*inputs, mask)
    return [output, *torch.autograd.grad((output.float() * torch.linspace(-1, 1, output.size(2)).cuda()).sum(), inputs)]


def exact(inputs: list[Tensor], mask: Tensor | None) -> list[Tensor]:
    """Return the same, written out in fp64."""
    wide = [each.detach().double().requires_grad_() for each in inputs]
    query, key, value = wide
    times = query.size(2) // key.size(2)
    key, value = key.repeat_interleave(times, 2), value.repeat_interleave(times, 2)
    scores = torch.einsum("qbhc,kbhc->bhqk", query, key) / query.size(3) ** 0.5
    hidden = mask if mask is not None else torch.ones(len(query), len(query), device="cuda").triu(1).bool()
    output = torch.einsum("bhqk,kbhc->qbhc", scores.masked_fill(hidden, -1e30).softmax(-1), value).flatten(2)
    return [output, *torch.autograd.grad((output * torch.linspace(-1, 1, output.size(2)).cuda()).sum(), wide)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("groups", [8, 2])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_attention(dtype: torch.dtype, groups: int, packed: bool, deterministic: bool) -> None:
    torch.manual_seed(0)
    inputs = qkv(192, groups, 64, dtype)
    mask = (
        segment_mask(torch.arange(192, device="cuda").div(50, rounding_mode="floor").expand(2, -1)) if packed else None
    )
    result = attended(inputs, mask, deterministic_mode=deterministic)
    for actual, expected in zip(result, exact(inputs, mask), strict=True):
        error = float((actual.double() - expected).norm() / expected.norm())
        assert error < (2e-6 if dtype == torch.float32 else 1e-2)


def test_attention_holds_no_scores() -> None:
    inputs = qkv(8192, 2, 64, torch.bfloat16)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attended(inputs, None)
    assert torch.cuda.max_memory_allocated() - before < 2 * 8 * 8192 * 8192 * 2 / 8  # an eighth of them


def run_of(run_dir: Path, training: dict[str, Any], parallel: dict[str, Any], **model: Any) -> Config:
    return Config(run_dir=run_dir).with_values(
        model={
            "num_layers": 4,
            "hidden_size": 256,
            "ffn_hidden_size": 512,
            "num_attention_heads": 8,
            "num_query_groups": 4,
            "vocab_size": WORDS,
            "max_position_embeddings": LENGTH,
            "position_embedding_type": "rope",
            "normalization": "RMSNorm",
            "swiglu": True,
            "add_bias_linear": False,
            "untie_embeddings_and_output_weights": True,
            **model,
        },
        training={"seq_length": LENGTH, "global_batch_size": SAMPLES, "steps": 20, **training},
        optimizer={"lr": 3e-4},
        parallel=parallel,
        checkpoint={"save": False, "resume": False},
        logging={"tensorboard": False, "plot": False},
    )


def batch_of(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(WORDS, (SAMPLES, 1), generator=generator)
    text = (start + 7 * torch.arange(LENGTH + 1)) % WORDS
    return {
        "tokens": text[:, :-1].contiguous(),
        "labels": text[:, 1:].contiguous(),
        "loss_mask": torch.ones(SAMPLES, LENGTH),
        "position_ids": torch.arange(LENGTH).expand(SAMPLES, LENGTH).contiguous(),
    }


def curve_of(config: Config) -> list[float]:
    with Trainer(config) as trainer, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.initialize()
        trainer.setup_model_and_optimizer()
        return [float(trainer.train(batch_of(step)).loss) for step in range(STEPS)]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_curve_is_that_of_megatrons_own_layers(tmp_path: Path, precision: str, recompute: str) -> None:
    config = run_of(tmp_path, {"precision": precision, "recompute": recompute}, {})
    ours = curve_of(config)
    with as_megatron():
        theirs = curve_of(config.with_values(training={"attention": "unfused"}))
    assert theirs[0] - theirs[-1] > 0.4
    assert ours == pytest.approx(theirs, abs=3e-2)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two GPUs found, which are started once: curves by layout and precision, and errors of their attention."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    path = tmp_path_factory.mktemp("pair")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_rank, (str(path), port), nprocs=2)
    return [json.loads((path / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], list[float]]:
    """The curves of one GPU by precision, and with experts or without, with nothing compiled."""
    path = tmp_path_factory.mktemp("alone")
    common = {"compile": "none", "micro_batch_size": 1}
    return {
        (precision, bool(model)): curve_of(run_of(path, {**common, "precision": precision}, {}, **model))
        for precision in ("fp32", "bf16")
        for model in ({}, EXPERTS)
    }


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_curve_of_two_gpus_is_that_of_one(
    pair: list[dict[str, Any]], alone: dict[tuple[str, bool], list[float]], layout: str, precision: str
) -> None:
    expected = alone[precision, "experts" in layout]
    for result in pair:
        assert result[f"{layout} {precision}"] == pytest.approx(expected, abs=1e-4 if precision == "fp32" else 3e-2)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_attention_of_two_gpus_that_share_a_sequence_is_exact(pair: list[dict[str, Any]], precision: str) -> None:
    """Output and gradients of query, key and value, in the place of the whole sequence."""
    for result in pair:
        assert max(result[f"attention {precision}"]) < (2e-6 if precision == "fp32" else 1e-2)


def _rank(rank: int, path: str, port: int) -> None:
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in ranks.items()}, MASTER_ADDR="127.0.0.1")
    result: dict[str, list[float]] = {}
    with process_group(10):  # to leave it takes long after so many runs, and nothing is to depend on that
        for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
            result[f"attention {precision}"] = _errors_of_shared_attention(dtype)
            for layout, parallel in LAYOUTS.items():
                model = EXPERTS if "experts" in layout else {}
                # experts are balanced within a micro batch: one of two samples would be another with each layout
                training = {"precision": precision, "micro_batch_size": 1 if model else 2}
                start = time.perf_counter()
                result[f"{layout} {precision}"] = curve_of(run_of(Path(path) / "run", training, parallel, **model))
                sys.stderr.write(f"rank {rank}: {layout} {precision}, {time.perf_counter() - start:.0f} s\n")
        (Path(path) / f"{rank}.json").write_text(json.dumps(result))


def _errors_of_shared_attention(dtype: torch.dtype) -> list[float]:
    torch.manual_seed(0)
    inputs = qkv(512, 2, 64, dtype)
    rows = rows_of(512, 2, dist.get_rank()).cuda()
    config = config_of(hidden_size=512, num_attention_heads=8, num_query_groups=2)
    config.context_parallel_size = 2
    mine = [each.detach()[rows].requires_grad_() for each in inputs]
    output = attention_of(SdpaAttention, config, cp=dist.group.WORLD)(*mine, None)
    weights = torch.linspace(-1, 1, output.size(2)).cuda()
    result = [output, *torch.autograd.grad((output.float() * weights).sum(), mine)]
    expected = [each[rows] for each in exact(inputs, None)]
    pairs = zip(result, expected, strict=True)
    return [float((actual.double() - wanted).norm() / wanted.norm()) for actual, wanted in pairs]
