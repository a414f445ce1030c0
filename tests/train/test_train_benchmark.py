"""The training benchmark: its runs are allowed, it sees a layout that trains garbage, and it counts time once."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.train import GPT2, LLAMA, Case, Measured, cases, config_of, missed, tables
from benchmarks.train_profile import IDLE, OTHER, shares_of
from train_entry.config.refusals import check


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_run_is_one_that_the_trainer_takes(ranks: int, tmp_path: Path) -> None:
    for case in cases(ranks):
        config = config_of(case, tmp_path)
        check(config, ranks, "cuda")
        assert config.training.global_batch_size == case.global_batch_size
        assert config.training.seq_length == (4096 if case.model == LLAMA else 1024)


def measured(name: str, tflops: float, loss: float, *, model: str = LLAMA, plain: bool = False) -> Measured:
    return Measured(Case(name, model, 8, 32, plain=plain), 1.0, 32.0, 131072.0, tflops, 60.0, loss)


def test_targets_that_are_missed() -> None:
    theirs = [measured("theirs", 120, 12, plain=True), measured("theirs", 140, 12, plain=True)]
    assert missed([*theirs, measured("ours", 510, 11)]) == []
    [slow] = missed([*theirs, measured("ours", 495, 11)])
    assert slow.startswith("495 TFLOP/s")
    [ratio] = missed([measured("theirs", 150, 12, plain=True), measured("ours", 510, 11)])
    assert ratio.startswith("3.40 times")


def test_a_layout_that_comes_to_another_loss_is_reported() -> None:
    fine = [measured("DP2", 500, 11.23), measured("PP2", 400, 11.231), measured("DP2", 400, 10.6, model=GPT2)]
    assert missed(fine) == []
    [problem] = missed([*fine, measured("TP2", 480, 12.14)])
    assert problem == "llama3.2-1b comes to different losses: DP2: 11.2300, PP2: 11.2310, TP2: 12.1400"


def test_the_tables() -> None:
    lines = tables([measured("DP2", 500.04, 11), measured("DP2", 400, 11, model=GPT2)]).splitlines()
    assert "| DP2 | 8 | 32 | 60.0 | 32.0 | 131,072 | 500.0 |" in lines
    assert sum(line.startswith("| gpt2-345m | micro batch |") for line in lines) == 1


def test_kernels_are_grouped_by_purpose() -> None:
    spans = [
        ("nvjet_sm90_tst_128x256_64x4", 0.0, 5000.0),
        ("ncclDevKernel_AllGather_RING_LL", 4000.0, 6000.0),  # at the same time as a product
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop", 6000.0, 9000.0),
        ("_overwrite", 9000.0, 9500.0),
        ("triton_red_fused__fused_rms_norm_0", 9500.0, 9600.0),
        ("a_kernel_of_tomorrow", 9600.0, 9700.0),
    ]
    result = shares_of(spans, 10.0)
    assert list(result) == [
        "matrix products",
        "attention",
        "communication",
        "loss",
        "norms and residuals (compiled)",
        OTHER,
        IDLE,
    ]
    assert result["matrix products"] == 5.0
    assert result[IDLE] == pytest.approx(0.3)
