"""A Qwen3-MoE from Hugging Face is trained over tensor and expert ranks, and exported as the same family."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from mcore_convert import verify
from tests.conftest import HfMaker
from tests.tensors import hf_tensors

RANKS = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "train_entry"]
FEW_STEPS = [
    "data=mock",
    "training=cpu",
    "training.steps=2",
    "training.seq_length=16",
    "training.global_batch_size=2",
    "schedule.warmup_steps=1",
    "logging=bare",
    "optimizer.lr=0.01",
]


def test_the_ready_configuration_trains_and_exports(hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    """Dense layers among those with experts, TP 2 and EP 2, the experts not cut."""
    source = hf_checkpoint("qwen3_moe-dense-layers", fill="normal")
    run = tmp_path / "run"
    words = ["qwen3-moe", f"checkpoint.init={source}", f"run_dir={run}", *FEW_STEPS]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, *RANKS, *words], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    exported = run / "hf/iter_0000002"
    assert verify(run / "checkpoints", exported).equal
    before, after = hf_tensors(source), hf_tensors(exported)
    assert sorted(before) == sorted(after)
    moved = "model.layers.1.mlp.gate.weight"
    assert not before[moved].equal(after[moved].to(before[moved].dtype))
