"""Speed of training, and the cost of each layout: `python -m benchmarks.train` on one GPU, or under torchrun.

    python -m benchmarks.train [--json FILE] [--steps 5]
    torchrun --nproc-per-node 4 -m benchmarks.train [--json FILE] [--steps 5]

On one GPU, Llama 3.2-1B is trained by the project's own trainer in two ways, one after the other: with what this
project adds to megatron-core, and without, as Megatron-LM trains it with its local layers. On two and four, that shape
and GPT2-345M are trained at every layout. Exits with 1 when a target of `benchmarks/README.md` is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.train_profile import Shares, profiled
from mcore_convert.megatron.model import Choices
from train_entry.config.compose import load_config
from train_entry.config.schema import Config
from train_entry.initialize import process_group
from train_entry.model.choices import Computation
from train_entry.pretrain import batches_of, samples_of
from train_entry.report.flops import flops_per_token
from train_entry.train_valid_test_datasets_provider import train_valid_test_datasets_provider
from train_entry.trainer import Trainer

TARGET_TFLOPS, TARGET_RATIO = 500, 3.5  # of one H200: in total, and relative to Megatron's local layers
SPREAD = 0.01  # of the losses of one model after the same steps: the effect of rounding in bf16
WARM_UP = 2  # steps: compilation, and allocations that happen once
PLAIN_STEPS = 2  # of Megatron's own layers, which take four times as long, with little variation
DISTRIBUTED = {"distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
LLAMA, GPT2 = "llama3.2-1b", "gpt2-345m"


@dataclass(frozen=True)
class Case:
    """Run to measure. `plain`: without this project's additions to megatron-core."""

    name: str
    model: str
    micro_batch_size: int
    global_batch_size: int
    parallel: dict[str, Any] = field(default_factory=dict)
    plain: bool = False
    profile: bool = False


@dataclass(frozen=True)
class Measured:
    """Cost of a run. Memory is that of the fullest GPU; seconds are the median of the steps."""

    case: Case
    seconds: float
    samples_per_second: float
    tokens_per_second: float
    tflops: float  # per GPU, as Megatron-LM counts
    gib: float
    loss: float
    shares: Shares | None = None


def cases(ranks: int) -> list[Case]:
    """Return the cases for this number of GPUs. The global batch grows with it."""
    if ranks == 1:
        return [
            Case("Megatron's local layers", LLAMA, 1, 32, plain=True),
            Case("Megatron's local layers", LLAMA, 2, 32, plain=True),
            Case("this project", LLAMA, 8, 32, profile=True),
            Case("this project", GPT2, 32, 128),
        ]
    sizes = {LLAMA: (8, 2, 16), GPT2: (32, 16, 64)}  # micro batch, the same in a pipeline, samples per step and GPU
    cases = []
    for model, (micro, piped, each) in sizes.items():
        for name, layout in layouts(ranks).items():
            size = piped if layout.get("pp", 1) > 1 else micro
            cases.append(Case(name, model, size, each * ranks, {**DISTRIBUTED, **layout}))
    return cases


def layouts(ranks: int) -> dict[str, dict[str, Any]]:
    """Return the layouts for two or four ranks."""
    sp = {"sequence_parallel": True}
    if ranks == 2:
        return {"DP2": {}, "TP2": {"tp": 2}, "TP2 + SP": {"tp": 2, **sp}, "PP2": {"pp": 2}}
    return {
        "DP4": {},
        "TP2 + SP x DP2": {"tp": 2, **sp},
        "PP2 x DP2": {"pp": 2},
        "TP2 x PP2": {"tp": 2, "pp": 2},
        "TP2 + SP x PP2": {"tp": 2, "pp": 2, **sp},
    }


def config_of(case: Case, run_dir: Path) -> Config:
    config = load_config(case.model, ["data=mock", "checkpoint=none", "logging=bare"])
    lengths = {LLAMA: 4096, GPT2: 1024}
    return config.model_copy(update={"run_dir": run_dir}).with_values(
        parallel={"distributed_optimizer": True, "overlap_param_gather": False, **case.parallel},
        training={
            "steps": 1000,
            "seq_length": lengths[case.model],
            "micro_batch_size": case.micro_batch_size,
            "global_batch_size": case.global_batch_size,
            "attention": "unfused" if case.plain else "auto",
        },
        logging={"interval": 1000},
    )


def measure(case: Case, run_dir: Path, steps: int) -> Measured | None:
    """Train for some steps, and free the GPU. None: it does not fit one GPU."""
    try:
        return _measure(case, run_dir, min(steps, PLAIN_STEPS) if case.plain else steps)
    except torch.OutOfMemoryError:
        if dist.get_world_size() > 1:  # the other ranks wait for messages of this one
            raise
        return None
    finally:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _measure(case: Case, run_dir: Path, steps: int) -> Measured:
    config = config_of(case, run_dir)
    with as_megatron() if case.plain else contextlib.nullcontext(), Trainer(config) as trainer:
        trainer.initialize()
        trainer.setup_model_and_optimizer()
        data = train_valid_test_datasets_provider(config, trainer.args, trainer.tokenizer, samples_of(config))
        assert data.train is not None
        batches = batches_of(trainer, data.train, 0)
        done = [trainer.train(batch) for batch in islice(batches, WARM_UP + steps)][WARM_UP:]
        gib = torch.tensor(torch.cuda.max_memory_allocated() / 2**30)
        shares = profiled(lambda: trainer.train(next(batches))) if case.profile else None
        cost = flops_per_token(trainer.args)
    dist.all_reduce(gib, op=dist.ReduceOp.MAX)
    seconds = statistics.median(step.seconds for step in done)
    tokens = done[0].num_tokens / seconds
    tflops = tokens * cost / 1e12 / dist.get_world_size()
    samples = done[0].num_samples / seconds
    return Measured(case, seconds, samples, tokens, tflops, float(gib), float(done[-1].loss), shares)


@contextlib.contextmanager
def as_megatron() -> Iterator[None]:
    """Scope in which the trainer uses only this project's loop: the state of Megatron-LM 0.16.1 for its users.

    Layers, norms, loss and optimizer are megatron-core's, with the fusions that Megatron-LM enables by default and
    that need neither Transformer Engine nor Apex.
    """
    with (
        mock.patch("train_entry.trainer.select", side_effect=_megatron_computation),
        mock.patch("train_entry.trainer.foreach_optimizers", contextlib.nullcontext),
        mock.patch("train_entry.trainer.fuse"),
    ):
        yield


def _megatron_computation(*_: Any) -> Computation:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    def block_spec(config: Any, vp_stage: int | None) -> Any:
        normalization = config.normalization
        return get_gpt_decoder_block_spec(config, False, normalization=normalization, vp_stage=vp_stage)

    settings = {"bias_activation_fusion": True, "bias_dropout_fusion": True, "attention_softmax_in_fp32": False}
    return Computation(Choices(settings, block_spec, GPTModel), lambda _: None)


def missed(measured: Sequence[Measured]) -> list[str]:
    """Return the missed targets, in words; and layouts that train to another loss, which is not a valid training."""
    problems = []
    for model in dict.fromkeys(each.case.model for each in measured):
        losses = {each.case.name: each.loss for each in measured if each.case.model == model and not each.case.plain}
        if losses and max(losses.values()) - min(losses.values()) > SPREAD:
            losses_of = ", ".join(f"{name}: {loss:.4f}" for name, loss in losses.items())
            problems.append(f"{model} comes to different losses: {losses_of}")
    ours = [each.tflops for each in measured if each.case.model == LLAMA and not each.case.plain]
    theirs = [each.tflops for each in measured if each.case.plain]
    if not theirs or not ours:
        return problems
    if ours[0] < TARGET_TFLOPS:
        problems.append(f"{ours[0]:.0f} TFLOP/s, where {TARGET_TFLOPS} are wanted of an H200")
    if ours[0] < TARGET_RATIO * max(theirs):
        problems.append(f"{ours[0] / max(theirs):.2f} times Megatron's local layers, where {TARGET_RATIO} are wanted")
    return problems


def tables(measured: Sequence[Measured]) -> str:
    """Return a table for each model, in Markdown, and the distribution of a step's time."""
    lines: list[str] = []
    for model in dict.fromkeys(each.case.model for each in measured):
        lines += [
            "",
            f"| {model} | micro batch | global batch | GiB per GPU | samples/s | tokens/s | TFLOP/s per GPU |",
            "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        ]
        for each in measured:
            if each.case.model == model:
                case = each.case
                lines.append(
                    f"| {case.name} | {case.micro_batch_size} | {case.global_batch_size} | {each.gib:.1f} "
                    f"| {each.samples_per_second:.1f} | {each.tokens_per_second:,.0f} | {each.tflops:.1f} |"
                )
    for each in measured:
        if each.shares:
            lines += ["", f"| a step of {each.case.model}, {each.case.name} | ms | share |", "| --- | ---: | ---: |"]
            total = sum(each.shares.values())
            lines += [f"| {name} | {ms:.1f} | {ms / total:.1%} |" for name, ms in each.shares.items()]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    parser.add_argument("--steps", type=int, default=5, help=f"measured steps of each run, after {WARM_UP}")
    parser.add_argument("--only", default="", help="runs whose model and name have this in them")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("error: this benchmark wants GPUs")
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    with process_group(10), tempfile.TemporaryDirectory() as own:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        places = [own]
        dist.broadcast_object_list(places)
        scratch = places[0]
        measurements: list[Measured] = []
        for number, case in enumerate(cases(ranks)):
            if options.only in f"{case.model} {case.name}":
                measured = measure(case, Path(scratch) / str(number), options.steps)
                measurements += [measured] if measured else []
                if rank == 0:
                    print(measured or f"does not fit: {case}", file=sys.stderr, flush=True)
        problems = missed(measurements)
        if rank == 0:  # before the shutdown of the ranks, which takes long
            print(f"{ranks} x {torch.cuda.get_device_name()}, torch {torch.__version__}")
            print(tables(measurements), flush=True)
            for problem in problems:
                print(f"missed: {problem}", file=sys.stderr)
            if options.json:
                options.json.write_text(json.dumps([asdict(each) for each in measurements], indent=1))
        dist.barrier()  # rank 0 removes the directory
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
