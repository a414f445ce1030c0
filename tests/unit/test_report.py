"""What a run tells: Megatron's count of operations, time per phase, and numbers that are each kept once."""

from __future__ import annotations

import io
import json
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mcore_convert.errors import ConfigError, UnreadableCheckpoint, UnwritableTarget
from tests.kinds import ROOT
from train_entry.config.schema import Config
from train_entry.report.console import Console, in_bytes, in_time, number, scaled
from train_entry.report.flops import flops_per_token, mfu
from train_entry.report.jsonl import read
from train_entry.report.metrics import Evaluation, Interval, Rates, Step, StepMetrics, memory_of, warnings_of
from train_entry.report.peak import peak_tflops
from train_entry.report.phases import MAX_SEGMENTS, Phases
from train_entry.report.plot import BAD, EVALUATIONS, TRAIN, plot, smoothed
from train_entry.report.report import Report

GPT2 = {
    "num_layers": 12,
    "hidden_size": 768,
    "ffn_hidden_size": 3072,
    "num_attention_heads": 12,
    "padded_vocab_size": 50304,
    "seq_length": 1024,
}
LLAMA_1B = {
    "num_layers": 16,
    "hidden_size": 2048,
    "ffn_hidden_size": 8192,
    "num_attention_heads": 32,
    "group_query_attention": True,
    "num_query_groups": 8,
    "swiglu": True,
    "padded_vocab_size": 128256,
    "seq_length": 4096,
}
WIDE_HEADS = LLAMA_1B | {
    "num_layers": 28,
    "hidden_size": 1024,
    "ffn_hidden_size": 3072,
    "num_attention_heads": 16,
    "kv_channels": 128,
    "padded_vocab_size": 151936,
    "seq_length": 2048,
}
LLAMA_7B = {
    "num_layers": 32,
    "hidden_size": 4096,
    "ffn_hidden_size": 11008,
    "num_attention_heads": 32,
    "swiglu": True,
    "padded_vocab_size": 32000,
    "seq_length": 4096,
}
MIXTRAL = LLAMA_7B | {
    "ffn_hidden_size": 14336,
    "group_query_attention": True,
    "num_query_groups": 8,
    "num_experts": 8,
    "moe_router_topk": 2,
}
SHARED_EXPERT = {
    "num_layers": 24,
    "hidden_size": 2048,
    "ffn_hidden_size": 5632,
    "num_attention_heads": 16,
    "swiglu": True,
    "num_experts": 60,
    "moe_ffn_hidden_size": 1408,
    "moe_shared_expert_intermediate_size": 5632,
    "moe_router_topk": 4,
    "padded_vocab_size": 151936,
    "seq_length": 2048,
}
EVERY_OTHER = {
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 256,
    "num_attention_heads": 4,
    "num_experts": 4,
    "moe_router_topk": 1,
    "moe_layer_freq": 2,
    "padded_vocab_size": 256,
    "seq_length": 32,
}


# What `num_floating_point_operations` of Megatron-LM at core_v0.16.1 returns for three samples of these.
@pytest.mark.parametrize(
    ("args", "three_samples"),
    [
        (GPT2, 2_451_553_910_784),
        (LLAMA_1B, 101_004_745_900_032),
        (LLAMA_7B, 526_709_019_377_664),
        (WIDE_HEADS, 26_299_695_366_144),
        (MIXTRAL, 979_432_932_114_432),
        (SHARED_EXPERT, 91_254_096_396_288),
        (EVERY_OTHER, 127_401_984),
        (EVERY_OTHER | {"moe_layer_freq": [1, 0, 1, 0]}, 127_401_984),
    ],
)
def test_the_count_is_megatrons(args: dict[str, Any], three_samples: int) -> None:
    assert flops_per_token(args) * 3 * args["seq_length"] == three_samples


def test_the_count_is_that_of_the_paper() -> None:
    """Equation 3 of https://arxiv.org/abs/2104.04473 without recomputation (72, not 96) and with half the attention."""
    layers, h, s, v = 12, 768, 1024, 50304
    assert flops_per_token(GPT2) == pytest.approx(72 * layers * h**2 * (1 + s / (12 * h) + v / (12 * layers * h)))
    assert flops_per_token(GPT2, 2048) - flops_per_token(GPT2) == 6 * layers * h * 1024


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.oracle
def test_the_count_is_what_torch_counts(family: str) -> None:
    """But for the half of the attention that is masked, which torch counts, and tables of rotary angles."""
    import transformers
    from torch.utils.flop_counter import FlopCounterMode

    samples, length = 2, 32
    args = {"num_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "padded_vocab_size": 320}
    model: Any
    if family == "gpt2":
        gpt2 = transformers.GPT2Config(
            n_layer=3, n_embd=64, n_head=4, vocab_size=320, n_positions=length, attn_implementation="eager"
        )
        model = transformers.GPT2LMHeadModel(gpt2)
    else:
        args |= {"ffn_hidden_size": 96, "num_query_groups": 2, "group_query_attention": True, "swiglu": True}
        llama = transformers.LlamaConfig(
            num_hidden_layers=3,
            hidden_size=64,
            intermediate_size=96,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=320,
            max_position_embeddings=length,
            attn_implementation="eager",
        )
        model = transformers.LlamaForCausalLM(llama)
    tokens = torch.randint(320, (samples, length))
    with FlopCounterMode(display=False) as counter:
        model(tokens, labels=tokens).loss.backward()
    counted = counter.get_total_flops()
    rotary = counter.get_flop_counts().get("LlamaForCausalLM.model.rotary_emb", {})
    masked = 6 * 3 * 64 * length  # of a token: layers, width of all heads, tokens
    assert counted - sum(rotary.values()) == samples * length * (flops_per_token(args, length) + masked)


@pytest.mark.parametrize(
    ("device", "precision", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H100 NVL", "fp16", 835.5),
        ("NVIDIA H200", "bf16", 989.4),
        ("NVIDIA GH200 480GB", "bf16", 989.4),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA A100 80GB PCIe", "fp32", 19.5),
        ("NVIDIA A10", "bf16", 125),
        ("NVIDIA A10G", "bf16", None),
        ("NVIDIA L40S", "bf16", 362),
        ("NVIDIA L40", "bf16", 181),
        ("NVIDIA L4", "bf16", 121),
        ("NVIDIA B200", "bf16", 2250),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("NVIDIA GeForce RTX 4090 D", "bf16", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
        ("NVIDIA GeForce RTX 3090 Ti", "bf16", 80),
        ("Quadro RTX 6000", "bf16", None),
        ("NVIDIA RTX 6000 Ada Generation", "bf16", 364.2),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", None),
        ("Tesla V100-SXM2-32GB", "fp16", 125),
        ("Tesla V100-SXM2-32GB", "bf16", None),
        ("Tesla V100-PCIE-16GB", "fp32", 14.0),
        ("Tesla T4", "fp16", 65),
        ("Some other device", "bf16", None),
    ],
)
def test_peaks_are_found_by_the_name_of_a_device(device: str, precision: Any, expected: float | None) -> None:
    assert peak_tflops(device, precision) == expected


def test_tf32_is_the_peak_of_fp32_only_where_it_is_used() -> None:
    assert peak_tflops("NVIDIA H100 80GB HBM3", "fp32") == 66.9
    assert peak_tflops("NVIDIA H100 80GB HBM3", "fp32", tf32=True) == 494.7
    assert peak_tflops("Tesla V100-SXM2-16GB", "fp32", tf32=True) == 15.7
    assert mfu(494.7, 989.4) == 0.5
    assert mfu(1.0, None) is None


class Ticks:
    """A clock that is set by hand; marks after `reached` lie ahead of it, as those of a busy GPU do."""

    def __init__(self) -> None:
        self.time = 0.0
        self.reached = math.inf
        self.waited = False

    def now(self) -> float:
        return self.time

    def is_past(self, mark: float) -> bool:
        return mark <= self.reached

    def seconds(self, start: float, end: float) -> float:
        self.waited = self.waited or end > self.reached
        return end - start


def test_time_belongs_to_the_innermost_phase_but_in_evaluation_and_saving() -> None:
    ticks = Ticks()
    phases = Phases(clock=ticks)
    ticks.time = 100  # before the first phase, and between phases: nobody's
    with phases("forward-backward"):
        ticks.time += 1
        with phases("data"):
            ticks.time += 2
            with phases("data"):
                ticks.time += 4
        ticks.time += 8
    ticks.time += 100
    with phases("eval"):
        with phases("data"):
            ticks.time += 16
        with phases("forward-backward"), phases("save"):
            ticks.time += 32
        ticks.time += 64
    assert phases.read() == {"forward-backward": 9, "data": 6, "eval": 112}
    assert phases.read() == {}


def test_a_phase_ends_with_an_error_and_is_read_while_it_lasts() -> None:
    ticks = Ticks()
    phases = Phases(clock=ticks)

    def fail() -> None:
        with phases("optimizer"):
            ticks.time += 1
            with phases("data"):
                ticks.time += 2
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    ticks.time += 100
    with phases("save"):
        ticks.time += 4
        assert phases.read() == {"optimizer": 1, "data": 2, "save": 4}
        ticks.time += 8
    assert phases.read() == {"save": 8}


def test_phases_do_not_wait_until_they_are_read() -> None:
    """However many there are: those that the device has passed are summed up, the others are kept."""
    ticks = Ticks()
    phases = Phases(clock=ticks)
    count = 3 * MAX_SEGMENTS
    for number_of_phase in range(count):
        ticks.reached = ticks.time - 10
        with phases("data" if number_of_phase % 2 else "optimizer"):
            ticks.time += 1
    assert not ticks.waited
    assert len(phases._segments) <= MAX_SEGMENTS
    assert phases.read() == {"data": count / 2, "optimizer": count / 2}
    assert ticks.waited


def test_phases_on_the_host_are_seconds() -> None:
    phases = Phases()
    with phases("data"):
        torch.ones(300, 300) @ torch.ones(300, 300)
    assert 0 < phases.read()["data"] < 5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_step_on_a_gpu_waits_for_nothing(tmp_path: Path) -> None:
    weight = torch.ones(4096, 4096, device="cuda")
    with Report(config_of(tmp_path, interval=1000, steps=2000), GPT2, device="cuda", stream=io.StringIO()) as report:
        report.step(step_of(1))
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for iteration in range(2, 52):
                with report.phases("forward-backward"):
                    for _ in range(4):
                        product = weight @ weight
                with report.phases("optimizer"):
                    norm = product.max()
                report.step(step_of(iteration, loss=weight.sum(), grad_norm=norm))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        report.flush()
    rows = read(tmp_path / "run" / "metrics.jsonl")
    assert (rows[-1]["loss"], rows[-1]["grad_norm"]) == (4096**2, 4096)
    seconds = rows[-1]["phases"]
    assert seconds["forward-backward"] > 50 * 4 * 2 * 4096**3 / 1e15  # no device does 1000 TFLOP/s in fp32
    assert seconds["optimizer"] < seconds["forward-backward"]
    assert rows[-1]["memory"]["reserved"] >= rows[-1]["memory"]["allocated"] >= 4096**2 * 4


def config_of(folder: Path, *, steps: int = 30, **logging: Any) -> Config:
    logging = {"tensorboard": False, "plot": False, "interval": 10} | logging
    return Config(run_dir=folder / "run").with_values(logging=logging, training={"steps": steps})


def step_of(iteration: int, **values: Any) -> StepMetrics:
    """A step of 8 samples in half a second, whose loss is its number."""
    given = {
        "loss": float(iteration),
        "grad_norm": 1.5,
        "lr": 3e-4,
        "num_tokens": 8 * 1024,
        "num_samples": 8,
        "seconds": 0.5,
    }
    return StepMetrics(iteration=iteration, **(given | values))


def test_a_line_every_few_steps_and_all_steps_in_the_file(tmp_path: Path) -> None:
    words = io.StringIO()
    with Report(config_of(tmp_path, peak_tflops=10), GPT2, world_size=4, stream=words) as report:
        for iteration in range(1, 26):
            report.step(step_of(iteration))
        assert [row["iteration"] for row in read(tmp_path / "run" / "metrics.jsonl")] == list(range(1, 21))
    lines = words.getvalue().splitlines()
    # the loss is that of the step; 16384 tokens/s of 798 MFLOP each on four devices of 10 TFLOP/s
    assert [re.findall(r"loss \S+", line) for line in lines] == [
        ["loss 1.0000"],
        ["loss 10.0000"],
        ["loss 20.0000"],
        ["loss 25.0000"],
    ]
    assert lines[1].startswith(
        "step 10/30  loss 10.0000  lr 3.00e-04  grad 1.50    16.4k tok/s  3.27 TFLOP/s  MFU 32.7%  "
    )
    assert "ETA" not in lines[0]
    assert "ETA" in lines[1]
    rows = read(tmp_path / "run" / "metrics.jsonl")
    assert [row["iteration"] for row in rows] == list(range(1, 26))
    assert [row["iteration"] for row in rows if "phases" in row] == [1, 10, 20, 25]
    expected = {
        "iteration": 7,
        "loss": 7.0,
        "grad_norm": 1.5,
        "lr": 3e-4,
        "num_tokens": 8192,
        "num_samples": 8,
        "seconds": 0.5,
        "tokens_per_second": 16384.0,
        "tflops": pytest.approx(flops_per_token(GPT2) * 16384 / 4 / 1e12),
        "mfu": pytest.approx(flops_per_token(GPT2) * 16384 / 4 / 1e13),
        "skipped": False,
    }
    assert rows[6] == expected
    assert 10e6 < rows[9]["memory"]["resident"] < 1e12


def test_a_cpu_has_no_mfu(tmp_path: Path) -> None:
    words = io.StringIO()
    with Report(config_of(tmp_path), GPT2, stream=words) as report:
        report.step(step_of(1))
    assert "FLOP/s" in words.getvalue()
    assert "MFU" not in words.getvalue()
    assert "mfu" not in read(tmp_path / "run" / "metrics.jsonl")[0]


def test_numbers_on_the_device_are_read_when_a_line_is_due(tmp_path: Path) -> None:
    """A tensor without data cannot be read, so a report that takes it has not waited for it."""
    nowhere = torch.empty((), device="meta")
    with Report(config_of(tmp_path), GPT2, stream=io.StringIO()) as report:
        known = {"loss": torch.tensor(2.5), "grad_norm": torch.tensor(0.5), "extra": {"accuracy": torch.tensor(0.25)}}
        report.step(step_of(1, **known))
        for iteration in range(2, 10):
            report.step(step_of(iteration, loss=nowhere, grad_norm=nowhere))
        with pytest.raises(RuntimeError, match="meta"):
            report.step(step_of(10))
    row = read(tmp_path / "run" / "metrics.jsonl")[0]
    assert (row["loss"], row["grad_norm"], row["extra"]) == (2.5, 0.5, {"accuracy": 0.25})


def test_phases_stand_in_the_line_and_in_the_file(tmp_path: Path) -> None:
    words, ticks = io.StringIO(), Ticks()
    with Report(config_of(tmp_path), GPT2, stream=words) as report:
        report.phases = Phases(clock=ticks)
        with report.phases("forward-backward"):
            ticks.time += 0.4
        with report.phases("optimizer"):
            ticks.time += 0.1
        with report.phases("save"):
            ticks.time += 0.5
        report.step(step_of(1))
    assert words.getvalue().rstrip().endswith("save 50%  fwd-bwd 40%  opt 10%")
    stored = read(tmp_path / "run" / "metrics.jsonl")[0]["phases"]
    assert stored == pytest.approx({"forward-backward": 0.4, "optimizer": 0.1, "save": 0.5})


def test_only_rank_0_shows_and_keeps_numbers(tmp_path: Path) -> None:
    words = io.StringIO()
    with Report(config_of(tmp_path, tensorboard=True, plot=True), GPT2, rank=3, world_size=16, stream=words) as report:
        report.step(step_of(1, loss=torch.empty((), device="meta")))
        report.evaluation(1, "valid", 2.0)
        report.flush()
        report.say("from rank 0 alone")
        report.say_all("first\nsecond")
    assert words.getvalue() == "[rank  3] first\n[rank  3] second\n"
    assert not (tmp_path / "run").exists()


def test_rank_0_speaks_for_itself_and_for_all(tmp_path: Path) -> None:
    words = io.StringIO()
    with Report(config_of(tmp_path), GPT2, world_size=2, stream=words) as report:
        report.say("hello")
        report.say_all("here")
    with Report(config_of(tmp_path), GPT2, stream=words) as report:
        report.say_all("alone")
    assert words.getvalue() == "hello\n[rank 0] here\nalone\n"


def test_evaluations_come_after_the_steps_before_them(tmp_path: Path) -> None:
    words = io.StringIO()
    with Report(config_of(tmp_path), GPT2, stream=words) as report:
        for iteration in range(1, 6):
            report.step(step_of(iteration))
        report.evaluation(5, "valid", math.log(20), num_tokens=4096, seconds=2.0, extra={"accuracy": 0.5})
    assert words.getvalue().splitlines()[-1] == "step  5/30  valid loss 2.9957  perplexity 20.0  accuracy 0.500  2.0s"
    rows = read(tmp_path / "run" / "metrics.jsonl")
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4, 5, 5]
    assert rows[-1] == {
        "iteration": 5,
        "evaluation": "valid",
        "loss": math.log(20),
        "perplexity": pytest.approx(20),
        "num_tokens": 4096,
        "seconds": 2.0,
        "extra": {"accuracy": 0.5},
    }


def test_what_is_wrong_is_said_at_once_and_then_once_a_line(tmp_path: Path) -> None:
    words = io.StringIO()
    with Report(config_of(tmp_path), GPT2, stream=words) as report:
        for iteration in range(1, 13):
            report.step(step_of(iteration, loss=math.nan if iteration >= 4 else 1.0))
            if iteration == 4:
                assert "warning: the loss is nan at step 4\n" in words.getvalue()
    said = [line for line in words.getvalue().splitlines() if line.startswith("warning")]
    assert said == [f"warning: the loss is nan at {steps}" for steps in ("step 4", "steps 5-10", "steps 11-12")]
    assert "step 10/30  loss nan" in words.getvalue()
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    losses = [json.loads(line, parse_constant=pytest.fail)["loss"] for line in text.splitlines()]
    assert losses == [1.0] * 3 + [None] * 9


def test_skipped_steps_are_said_and_their_loss_is_not_shown(tmp_path: Path) -> None:
    words = io.StringIO()
    with Report(config_of(tmp_path), GPT2, stream=words) as report:
        for iteration in range(1, 11):
            overflows = iteration in (5, 6, 7, 9)
            report.step(
                step_of(
                    iteration,
                    loss=99.0 if overflows else 2.0,
                    grad_norm=math.inf if overflows else 1.0,
                    skipped=overflows,
                    loss_scale=1024.0,
                )
            )
    lines = words.getvalue().splitlines()
    assert "skipped: the gradients overflowed, the weights did not change; the loss scale is now 1024" in lines[1]
    assert lines[3].startswith("warning: steps 6-7, 9 skipped: the gradients")
    assert lines[4].startswith("step  9/30  loss 2.0000 ")


def test_a_norm_that_is_not_finite_is_said() -> None:
    steps = [Step.of(step_of(i, grad_norm=math.inf if i == 3 else 1.0)) for i in range(1, 5)]
    assert warnings_of(steps) == ["the norm of the gradients is not finite at step 3"]
    assert warnings_of([Step.of(step_of(1, grad_norm=None))]) == []


def run_until(config: Config, until: int, *, start: int = 0, offset: float = 0.0) -> None:
    with Report(config, GPT2, start=start, stream=io.StringIO()) as report:
        for iteration in range(start + 1, until + 1):
            report.step(step_of(iteration, loss=iteration + offset))
            if iteration % 5 == 0:
                report.evaluation(iteration, "valid", iteration + offset)


def test_a_resumed_run_has_each_step_once(tmp_path: Path) -> None:
    """In the file and in TensorBoard: what came after the checkpoint is replaced."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = config_of(tmp_path, tensorboard=True)
    run_until(config, 18)
    run_until(config, 30, start=12, offset=0.5)
    rows = read(config.run_dir / "metrics.jsonl")
    losses = [float(i) for i in range(1, 13)] + [i + 0.5 for i in range(13, 31)]
    assert [row["loss"] for row in rows if "evaluation" not in row] == losses
    assert [row["loss"] for row in rows if "evaluation" in row] == [5, 10, 15.5, 20.5, 25.5, 30.5]
    events = EventAccumulator(str(config.run_dir / "tensorboard"))
    events.Reload()
    assert [(each.step, each.value) for each in events.Scalars("train/loss")] == list(enumerate(losses, 1))
    assert [each.step for each in events.Scalars("valid/loss")] == [5, 10, 15, 20, 25, 30]
    assert {each.value for each in events.Scalars("speed/tokens_per_second")} == {16384.0}
    assert "memory/resident" in events.Tags()["scalars"]


def test_a_file_of_a_killed_run_goes_on_wherever_it_was_torn(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    run_until(config, 12)
    path = config.run_dir / "metrics.jsonl"
    whole = path.read_bytes()
    second_last = whole.rindex(b"\n", 0, whole.rindex(b"\n", 0, -1)) + 1
    for length in range(second_last, len(whole), 7):
        path.write_bytes(whole[:length])
        assert [row["iteration"] for row in read(path) if "evaluation" not in row][-1] in (10, 11)
        run_until(config, 14, start=10, offset=0.5)
        losses = [row["loss"] for row in read(path) if "evaluation" not in row]
        assert losses == [*map(float, range(1, 11)), 11.5, 12.5, 13.5, 14.5]
        assert path.read_bytes().startswith(whole[: whole.index(b'{"iteration": 11')])
    assert [each.name for each in config.run_dir.iterdir()] == ["metrics.jsonl"]


def test_lines_before_a_torn_one_are_not_rewritten(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    run_until(config, 10)
    path = config.run_dir / "metrics.jsonl"
    before = path.stat().st_ino
    run_until(config, 12, start=10)
    assert path.stat().st_ino == before
    assert len(read(path)) == 14


@pytest.fixture
def fake_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package of that name which writes down how it is called; steps below `run.step` would be a mistake."""
    log = tmp_path / "calls.jsonl"
    (tmp_path / "packages" / "wandb").mkdir(parents=True)
    (tmp_path / "packages" / "wandb" / "__init__.py").write_text(
        f"""
import json

def note(**call):
    with open({str(log)!r}, "a") as file:
        file.write(json.dumps(call) + "\\n")

class Run:
    def __init__(self, id):
        self.id, self.step = id or "new-id", 16 if id else 0

    def log(self, values, step):
        assert step >= self.step
        self.step = step
        note(step=step, **values)

    def finish(self):
        note(finish=True)

def init(**options):
    note(**options)
    return Run(options["id"])
"""
    )
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    yield log
    sys.modules.pop("wandb", None)


def test_wandb_goes_on_with_the_run_that_it_knows(tmp_path: Path, fake_wandb: Path) -> None:
    config = config_of(tmp_path, wandb=True, wandb_project="project")
    run_until(config, 20)
    first = [json.loads(line) for line in fake_wandb.read_text().splitlines()]
    assert (first[0]["project"], first[0]["name"], first[0]["id"]) == ("project", "run", None)
    assert first[0]["config"]["training"]["steps"] == 30
    assert [call["step"] for call in first if "train/loss" in call] == list(range(1, 21))
    assert [(call["step"], call["valid/loss"]) for call in first if "valid/loss" in call] == [
        (5, 5.0),
        (10, 10.0),
        (15, 15.0),
        (20, 20.0),
    ]
    assert first[-1] == {"finish": True}
    fake_wandb.unlink()
    run_until(config, 20, start=12)  # it has 15 steps already, more than the checkpoint
    second = [json.loads(line) for line in fake_wandb.read_text().splitlines()]
    assert (second[0]["id"], second[0]["resume"]) == ("new-id", "allow")
    assert [call["step"] for call in second if "train/loss" in call] == [16, 17, 18, 19, 20]


def test_packages_that_are_missing_are_named_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("wandb", "matplotlib"):
        monkeypatch.setitem(sys.modules, name, None)
    for rank in (0, 1):
        with pytest.raises(ConfigError) as refusal:
            Report(config_of(tmp_path, wandb=True, plot=True), GPT2, rank=rank, world_size=2)
        assert refusal.value.items == ("logging.wandb=true needs `wandb`", "logging.plot=true needs `matplotlib`")
        assert "pip install 'mcore-convert[train,wandb]'" in str(refusal.value)
    assert not (tmp_path / "run").exists()


def test_a_run_directory_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(UnwritableTarget, match="run directory"):
        Report(config_of(tmp_path), GPT2)


def test_an_error_of_the_run_is_not_hidden_by_its_report(tmp_path: Path) -> None:
    def fail(loss: torch.Tensor) -> None:
        with Report(config_of(tmp_path), GPT2, stream=io.StringIO()) as report:
            report.step(step_of(1))
            report.step(step_of(2, loss=loss))
            raise KeyError

    with pytest.raises(KeyError):
        fail(torch.tensor(2.5))
    assert len(read(tmp_path / "run" / "metrics.jsonl")) == 2
    with pytest.raises(KeyError):
        fail(torch.empty((), device="meta"))  # as if its device were lost


def test_a_report_is_closed_once(tmp_path: Path) -> None:
    words = io.StringIO()
    report = Report(config_of(tmp_path, plot=True), GPT2, stream=words)
    report.close()
    assert words.getvalue() == ""  # no step, no picture
    report = Report(config_of(tmp_path, plot=True), GPT2, stream=words)
    report.step(step_of(1))
    report.close()
    report.close()
    assert words.getvalue().count("loss.png") == 1


Image = Any


def picture_of(folder: Path, losses: list[float | None], *, first: int = 1, valid: list[int] | None = None) -> Image:
    from matplotlib.image import imread

    rows: list[dict[str, Any]] = [
        {"iteration": i, "loss": loss, "lr": 1e-3 / i, "num_tokens": 512} for i, loss in enumerate(losses, first)
    ]
    rows += [{"iteration": i, "evaluation": "valid", "loss": 2.0} for i in valid or []]
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    path = plot(folder)
    assert path == folder / "loss.png"
    assert sorted(each.name for each in folder.iterdir()) == ["loss.png", "metrics.jsonl"]
    return imread(path)


def has(picture: Image, colour: str) -> bool:
    wanted = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return bool((np.abs(picture[..., :3] - wanted) < 0.01).all(axis=-1).any())


@pytest.mark.parametrize(
    ("losses", "valid", "shows"),
    [
        pytest.param([3.0], [], (True, False, False), id="one"),
        pytest.param([5.0, 4.0, 3.5, 3.2], [2, 4], (True, True, False), id="few"),
        pytest.param([4 + 3 / i for i in range(1, 200)], [100], (True, True, False), id="many"),
        pytest.param([4.0] * 30 + [None] * 3 + [4.0] * 30, [], (True, False, True), id="with NaN"),
        pytest.param([None, None], [], (False, False, True), id="all NaN"),
        pytest.param([*range(8, 4, -1), *[4.0] * 200, 4e4, *[4.0] * 200], [], (True, False, False), id="spike"),
    ],
)
@pytest.mark.slow
def test_the_picture_shows_what_there_is(
    tmp_path: Path, losses: list[float | None], valid: list[int], shows: tuple[bool, bool, bool]
) -> None:
    picture = picture_of(tmp_path / "run", losses, valid=valid)
    assert picture.shape[:2] == (960, 1600)
    curve = picture[200:745, 200:1200]  # beside the legend
    assert (has(curve, TRAIN), has(picture, EVALUATIONS[0]), has(curve, BAD)) == shows


def test_a_picture_needs_a_step(tmp_path: Path) -> None:
    with pytest.raises(UnreadableCheckpoint, match="no steps"):
        plot(tmp_path)


def test_smoothing_is_a_mean_of_means() -> None:
    """By the definition, one value at a time."""
    values = np.random.default_rng(1).normal(size=60)
    values[20:23] = np.nan

    def mean(of: Any, at: int, reach: int) -> float:
        near = of[at - min(reach, at) : at + min(reach, at) + 1]
        return float(np.nanmean(near))

    once = np.array([mean(values, at, 3) for at in range(60)])
    twice = np.array([mean(once, at, 3) for at in range(60)])
    twice[20:23] = np.nan
    np.testing.assert_allclose(smoothed(values, 6), twice)
    steep = np.array([100.0 / (1 + at) for at in range(50)])
    assert smoothed(steep, 6)[0] == 100.0


def test_numbers_for_people() -> None:
    seconds = (0.04, 59.94, 59.96, 185, 7620, 450000)
    assert [in_time(each) for each in seconds] == ["0.0s", "59.9s", "1m00s", "3m05s", "2h07m", "5d05h"]
    assert [scaled(each) for each in (0.5, 999.4, 999.6, 12345.0, 4.3e14)] == [
        ("0.500", ""),
        ("999", ""),
        ("1.00", "k"),
        ("12.3", "k"),
        ("430", "T"),
    ]
    assert [number(each) for each in (0.0, 0.0302, 1.234, 256.3, 1e5, math.inf, math.nan)] == [
        "0",
        "0.0302",
        "1.23",
        "256",
        "1.0e+05",
        "inf",
        "nan",
    ]
    assert in_bytes(41.24e9) == "41.2 GB"


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
def test_memory_is_the_most_that_this_process_has_had() -> None:
    before = memory_of(torch.device("cpu"))["resident"]
    most = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert most is not None
    assert before <= int(most[1]) * 1024 <= memory_of(torch.device("cpu"))["resident"] + 2**24


def test_the_page_shows_lines_as_they_are() -> None:
    """`docs/watch-a-run.md` has them where no run can make them again: on a GPU, and when something is wrong."""
    words = io.StringIO()
    console = Console(2000, words)
    steps = [Step.of(step_of(i, loss=11.4072, grad_norm=2.311, lr=3e-5, seconds=1.0)) for i in range(2, 11)]
    phases = {"forward-backward": 0.93 * 9, "optimizer": 0.06 * 9, "data": 0.004 * 9}
    speed = Rates(flops_per_token(LLAMA_1B), 1, 989.4).speed(52_440, 1.0)
    console.steps(Interval(steps, speed, {"allocated": 41_237_000_000}, phases, eta=1231.0), [])
    console.evaluation(Evaluation(500, "valid", 4.2135, seconds=3.1), {})
    said = words.getvalue().splitlines()
    nan = [Step.of(step_of(12, loss=math.nan))]
    skipped = [Step.of(step_of(i, skipped=True, loss_scale=8192.0)) for i in (3, 4, 5)]
    said += [f"warning: {text}" for each in (nan, skipped) for text in warnings_of(each)]
    page = (ROOT / "docs" / "watch-a-run.md").read_text().splitlines()
    assert [line for line in said if line not in page] == []
    assert len(said) == 4
