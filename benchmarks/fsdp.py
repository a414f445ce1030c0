"""Megatron-FSDP resumes from converted checkpoints, in bfloat16: `python -m benchmarks.fsdp DIR`, on two GPUs.

The Llama of `benchmarks.resume` takes twenty steps under Megatron-FSDP. Before step 10 it is saved as `fsdp_dtensor`,
as `checkpointing.py` in Megatron-LM's core_v0.16.1 does. It resumes from that checkpoint, and from one that
`mcore-convert reshard` makes of it by way of `torch_dist`; Megatron Core's distributed optimizer resumes from the
`torch_dist`. A run of the distributed optimizer goes the other way. The losses are compared.

Adam is torch's, with its state in the form of Transformer Engine's. With `--as-it-is` it is torch's own: Megatron Core
cannot save that, and the positions of its ranks after `--seconds` are printed.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp

from benchmarks.resume import LLAMA, LR, RENDEZVOUS, SAVED_AT, SPREAD, UNTIL, _on_this_device, _row
from fixtures import training
from fixtures.megatron import fill, random_weights
from fixtures.training import SAMPLES, TRACKER, Run, train
from mcore_convert.megatron.parallel import model_parallel
from mcore_convert.spec.layout import Layout
from train_entry.optimizer.torch_adam import allocate

STRATEGIES = ("optim", "optim_grads", "optim_grads_params")
FSDP, DISTRIBUTED = "fsdp", "distributed"
# Optimizer and start of each run. The first two start at step 0 and are saved.
RUNS = {
    "saved": (FSDP, None),
    "distributed": (DISTRIBUTED, None),
    "loaded": (FSDP, "saved/checkpoint"),
    "to-distributed": (DISTRIBUTED, "between"),
    "returned": (FSDP, "returned/checkpoint"),
    "from-distributed": (FSDP, "from-distributed/checkpoint"),
}
# Source and format of the checkpoints that are made for runs.
RESHARDED = {
    "between": ("saved/checkpoint", "torch_dist"),
    "returned/checkpoint": ("between", "fsdp_dtensor"),
    "from-distributed/checkpoint": ("distributed/checkpoint", "fsdp_dtensor"),
}
LAYOUTS = {"dp2": Layout(), "tp2": Layout(tp=2), "ep2": Layout(ep=2)}
EXPERTS = {"num_experts": 4, "moe_ffn_hidden_size": 344, "moe_router_topk": 2}
SECONDS = 120  # per run


@dataclass(frozen=True)
class Way:
    """Setup of Megatron-FSDP: the layout, the sharded tensors, and whether Adam is torch's own."""

    layout: Layout
    strategy: str
    as_it_is: bool

    @property
    def args(self) -> Mapping[str, Any]:
        """Megatron-LM's arguments."""
        return {**LLAMA, **EXPERTS} if self.layout.ep > 1 else LLAMA


class Adam(torch.optim.AdamW):
    """Adam with the state of Transformer Engine's: every parameter has moments, and groups count the steps.

    A parameter without rows has no gradient, and torch's Adam creates no state for it (`fused_adam.py` of Transformer
    Engine does). Megatron Core requests the shapes of each existing state from all ranks, which would wait for others.
    """

    def step(self, closure: Any = None) -> Any:
        """Take a step; each parameter has a count only during it."""
        allocate(self)
        for group in self.param_groups:
            group.setdefault("step", 0)
            for parameter in group["params"]:
                self.state[parameter]["step"] = torch.tensor(float(group["step"]), device="cpu")
        result = super().step(closure)
        for group in self.param_groups:
            group["step"] += 1
            for parameter in group["params"]:
                del self.state[parameter]["step"]
        return result

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the loaded state; torch's Adam needs a count for each parameter."""
        torch.optim.Optimizer.__setstate__(self, state)


def work(folder: Path, name: str, way: Way, seconds: int) -> None:
    """Train on one rank of a run, and write the losses."""
    faulthandler.dump_traceback_later(seconds, exit=True)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.use_deterministic_algorithms(True, warn_only=True)
    weights = random_weights(way.args, spread=SPREAD)
    dist.init_process_group("nccl")
    under, source = RUNS[name]
    load, save = None if source is None else folder / source, folder / name / "checkpoint"
    with mock.patch.multiple(training, LR=LR, MIN_LR=LR / 10):
        if under == FSDP:
            losses = _train_fsdp(way, weights, load, save)
        else:
            with _on_this_device():
                steps = train(
                    way.args,
                    way.layout,
                    until=UNTIL,
                    distributed=True,
                    dtype=torch.bfloat16,
                    weights=weights,
                    load=load,
                    saves=None if load else {"fully_reshardable": save},
                    save_at=SAVED_AT,
                )
            losses = [step.loss for step in steps]
    if dist.get_rank() == 0:
        (folder / f"{name}.json").write_text(json.dumps(losses) + "\n")
    dist.destroy_process_group()


def _train_fsdp(way: Way, weights: Any, load: Path | None, save: Path) -> list[float]:
    losses = []
    with model_parallel(way.layout.tp, 1, None, way.layout.ep):
        with _on_this_device():
            run = _build(way, weights)
        first = 0 if load is None else _load(run, load)
        for number in range(first, UNTIL):
            if number == SAVED_AT and load is None:
                _save(run, save, number, way.strategy)
            with _on_this_device():
                losses.append(training._step(run, number).loss)
    return losses


def _build(way: Way, weights: Any) -> Run:
    """Return the run of `fixtures.training`, with the wrapper of `--use-megatron-fsdp` around that of `--bf16`."""
    from megatron.core import distributed
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter as adapter
    from megatron.core.transformer.module import Float16Module

    def wrapped(config: Any, ddp: Any, stage: Any, disable_bucketing: bool) -> Any:
        fill(stage, weights)
        return adapter.FullyShardedDataParallel(
            config, ddp, Float16Module(config, stage), disable_bucketing=disable_bucketing
        )

    plain = distributed.DistributedDataParallelConfig

    def settings(**options: Any) -> Any:
        return plain(
            **options, overlap_param_gather=True, use_megatron_fsdp=True, data_parallel_sharding_strategy=way.strategy
        )

    args = {**way.args, "overlap_grad_reduce": True, "ddp_bucket_size": 40_000_000}
    with (
        mock.patch.multiple(distributed, DistributedDataParallel=wrapped, DistributedDataParallelConfig=settings),
        # no layer here is one; without Transformer Engine it is not a type either, which 0.16.1 needs at TP2
        mock.patch.object(adapter, "TELinear", type, create=True),
        mock.patch.object(torch.optim, "AdamW", torch.optim.AdamW if way.as_it_is else Adam),
    ):
        return training._build(args, way.layout, True, torch.bfloat16)


def _save(run: Run, path: Path, iteration: int, strategy: str) -> None:
    from megatron.core import parallel_state

    layout = run.layout
    args = argparse.Namespace(
        **run.args,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=1,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.tp if layout.ep == 1 else 1,
        transformer_impl="local",
        use_distributed_optimizer=True,
        use_megatron_fsdp=True,
        data_parallel_sharding_strategy=strategy,
        ckpt_format="fsdp_dtensor",
        consumed_train_samples=iteration * SAMPLES,
    )
    state = {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": iteration,
        **_state_of(run, is_loading=False),
        "rng_state": {f"(0, {parallel_state.get_tensor_model_parallel_rank()})": [_random_state()]},
        "num_floating_point_operations_so_far": 1e9,
    }
    folder = path / f"iter_{iteration:07d}"
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    dcp.save(state_dict=_split(run, state), storage_writer=dcp.FileSystemWriter(folder))
    if dist.get_rank() == 0:
        (path / TRACKER).write_text(str(iteration))
    dist.barrier()


def _load(run: Run, path: Path) -> int:
    """Load as `load_checkpoint` does with `--no-load-rng`, and return the step to resume from."""
    folder = path / f"iter_{int((path / TRACKER).read_text()):07d}"
    whole = _state_of(run, is_loading=True)
    state = _split(run, {"args": None, "checkpoint_version": 3.0, "iteration": 1, **whole})
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(state, storage_reader=dcp.FileSystemReader(folder), planner=planner)
    run.chunks[0].load_state_dict(whole["model"])  # contains gate and up of the loaded state
    run.optimizer.load_state_dict(whole["optimizer"])
    run.scheduler.load_state_dict(state["opt_param_scheduler"])
    return int(state["iteration"])


def _state_of(run: Run, *, is_loading: bool) -> dict[str, Any]:
    from megatron.core.utils import unwrap_model

    (module,) = unwrap_model(run.chunks)
    weights = module.state_dict_for_save_checkpoint()
    metadata = {"distrib_optim_sharding_type": "fsdp_dtensor"}
    optimizer = run.optimizer.sharded_state_dict({"model": weights}, is_loading=is_loading, metadata=metadata)
    return {"model": weights, "optimizer": optimizer, "opt_param_scheduler": run.scheduler.state_dict()}


def _split(run: Run, whole: dict[str, Any]) -> dict[str, Any]:
    """Return a state in its stored form: `preprocess_fsdp_dtensor_state_dict` of Megatron-LM."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp import uneven_dtensor
    from megatron.core.transformer import fsdp_dtensor_checkpoint
    from megatron.core.utils import unwrap_model

    (module,) = unwrap_model(run.chunks)
    weights, optimizer = fsdp_dtensor_checkpoint.handle_swiglu_in_state_dict(module, whole["model"], whole["optimizer"])
    weights = fsdp_dtensor_checkpoint.handle_experts_in_state_dict(weights, run.args.get("num_experts"))
    stored = {**whole, "model": weights, "optimizer": optimizer}
    uneven_dtensor.preprocess_state_dict_for_uneven_dtensor(stored)
    return stored


def _random_state() -> dict[str, Any]:
    from megatron.core import tensor_parallel

    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state(),
        "rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def everything(folder: Path, layout: Layout, words: list[str], seconds: int) -> None:
    """Train, reshard, and resume."""
    folder.mkdir(parents=True)
    for name, (_, source) in RUNS.items():
        if source in RESHARDED:
            origin, form = RESHARDED[source]
            sizes = (f"--tp={layout.tp}", f"--ep={layout.ep}")
            paths = (folder / origin, folder / source)
            _run(600, "-m", "mcore_convert", "reshard", "--quiet", *paths, f"--to={form}", *sizes)
        launcher = ("-m", "torch.distributed.run", *RENDEZVOUS, "--nproc-per-node=2", "-m", "benchmarks.fsdp")
        _run(seconds + 60, *launcher, folder, name, *words)
    _run(600, "-m", "mcore_convert", "verify", folder / "saved/checkpoint", folder / "returned/checkpoint")


def _run(seconds: int, *words: str | Path) -> None:
    # cuBLAS is deterministic with a workspace of fixed size; gloo would otherwise resolve the name of the host
    chosen = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    start = time.perf_counter()
    subprocess.run([sys.executable, *words], env=chosen | os.environ, check=True, timeout=seconds)
    shown = " ".join(str(word) for word in words if not str(word).startswith("--rdzv"))
    print(f"{time.perf_counter() - start:.0f} s: {shown}", file=sys.stderr, flush=True)


def table(folder: Path) -> str:
    """Return the losses after each checkpoint, and their differences from the run that saved it, in Markdown."""
    losses = {name: json.loads((folder / f"{name}.json").read_text())[-(UNTIL - SAVED_AT) :] for name in RUNS}
    rows = zip(range(SAVED_AT, UNTIL), *losses.values(), strict=True)
    lines = [_row("step", *RUNS), _row(*["---:"] * (len(RUNS) + 1))]
    lines += [_row(str(step), *(f"{loss:.5f}" for loss in each)) for step, *each in rows]
    apart = []
    for name, each in losses.items():
        origin = losses["distributed" if name == "from-distributed" else "saved"]
        apart.append([abs(a - b) for a, b in zip(each, origin, strict=True)])
    lines.append(_row(f"difference at step {SAVED_AT}", *(f"{each[0]:.1e}" for each in apart)))
    lines.append(_row("largest difference", *(f"{max(each):.1e}" for each in apart)))
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR", help="a folder to make, for checkpoints and losses")
    parser.add_argument("run", nargs="?", choices=RUNS, help=argparse.SUPPRESS)
    parser.add_argument("--layout", choices=LAYOUTS, default="dp2", help="default: %(default)s; ep2 has experts")
    parser.add_argument("--strategy", choices=STRATEGIES, default=STRATEGIES[-1], help="default: %(default)s")
    parser.add_argument("--as-it-is", action="store_true", help="with torch's own Adam")
    parser.add_argument("--seconds", type=int, default=SECONDS, help="a run may take (default: %(default)s)")
    options = parser.parse_args()
    layout = LAYOUTS[options.layout]
    if options.run:
        work(options.folder, options.run, Way(layout, options.strategy, options.as_it_is), options.seconds)
        return 0
    words = [f"--layout={options.layout}", f"--strategy={options.strategy}", f"--seconds={options.seconds}"]
    words += ["--as-it-is"] if options.as_it_is else []
    everything(options.folder, layout, words, options.seconds)
    print(table(options.folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
