"""Training resumes after a reshard, in bfloat16: `python -m benchmarks.resume DIR`, on four GPUs (else slowly on CPUs).

A small Llama takes twenty steps at TP2 x PP2 under Megatron Core's distributed optimizer, with fp32 master copies, and
is saved before step 10 in both formats. `mcore-convert reshard` converts that to other layouts, where Megatron Core
resumes. The losses are compared with those of the run that was never interrupted.

Another layout rounds differently: it sums the shares of its tensor ranks in bfloat16. The effect of that alone is
measured too, by a run at each layout from step 0. GPU algorithms are deterministic, so there is no other effect.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from fixtures import training
from fixtures.megatron import random_weights
from fixtures.training import Form, Run, Step, train
from mcore_convert.spec.layout import Layout

SAVED_AT, UNTIL = 10, 20
FORMS: tuple[Form, ...] = ("dp_reshardable", "distrib_optim")
UNINTERRUPTED, FORGOTTEN = "uninterrupted", "forgotten"
LLAMA: dict[str, Any] = {
    "num_layers": 8,
    "hidden_size": 256,
    "ffn_hidden_size": 688,
    "num_attention_heads": 8,
    "group_query_attention": True,
    "num_query_groups": 4,
    "kv_channels": 32,
    "max_position_embeddings": 16,
    "seq_length": 16,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "swiglu": True,
    "untie_embeddings_and_output_weights": True,
    "vocab_size": 64,
    "padded_vocab_size": 64,
    "make_vocab_size_divisible_by": 16,
    "bf16": True,
}
RENDEZVOUS = ("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1")
SPREAD = 0.02  # of the weights at step 0
LR = (
    4e-4  # at ten times that, as the tests have it, rounding in bfloat16 grows to 5e-2 within ten steps, reshard or not
)


class Place(NamedTuple):
    """Place of a run: a layout, its number of replicas, and the place whose checkpoints are resharded to it."""

    title: str
    layout: Layout
    dp: int = 1
    source: str | None = None

    @property
    def ranks(self) -> int:
        return self.layout.tp * self.layout.pp * self.dp


SAVED = "saved"  # the place of the run that is saved; runs resumed there are not resharded
PLACES = {
    SAVED: Place("TP2 PP2, as saved", Layout(tp=2, pp=2)),
    "tp1pp1": Place("TP1 PP1", Layout(), source=SAVED),
    "tp4": Place("TP4", Layout(tp=4), source=SAVED),
    "tp2dp2": Place("TP2 DP2", Layout(tp=2), dp=2, source=SAVED),
    "pp2vpp2": Place("PP2 VPP2", Layout(pp=2, vpp=2), source=SAVED),
    "back": Place("PP2 VPP2, then TP2 PP2", Layout(tp=2, pp=2), source="pp2vpp2"),
}


def work(folder: Path, name: str, lr: float) -> None:
    """Resume on one rank from every checkpoint of a place, and train from step 0; the losses go into files.

    The first place saves its checkpoints during training, and resumes from them.
    """
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.use_deterministic_algorithms(True, warn_only=True)
    weights = random_weights(LLAMA, spread=SPREAD)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    here, layout = folder / name, PLACES[name].layout
    options: dict[str, Any] = {"until": UNTIL, "distributed": True, "dtype": torch.bfloat16}
    saves = {form: here / form for form in FORMS} if name == SAVED else None
    try:
        with _on_this_device(), mock.patch.multiple(training, LR=lr, MIN_LR=lr / 10):
            steps_of = {UNINTERRUPTED: train(LLAMA, layout, weights=weights, saves=saves, save_at=SAVED_AT, **options)}
            for path in sorted(each for each in here.iterdir() if each.is_dir()):
                steps_of[path.name] = train(LLAMA, layout, load=path, **options)
            if name == SAVED:  # as a control: the effect of lost optimizer state
                with _forgetting():
                    steps_of[FORGOTTEN] = train(LLAMA, layout, weights=weights, **options)
        if dist.get_rank() == 0:
            losses = {run: [step.loss for step in steps] for run, steps in steps_of.items()}
            (here / "losses.json").write_text(json.dumps(losses, indent=2) + "\n")
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def _on_this_device() -> Iterator[None]:
    """Scope in which `fixtures.training` trains on the current GPU, if there is one."""
    if not torch.cuda.is_available():
        yield
        return
    batches_of = training._batches

    def batches(run: Run, number: int) -> list[tuple[Tensor, Tensor]]:
        with torch.device("cpu"):  # drawn on the CPU: the same tokens everywhere
            made = batches_of(run, number)
        return [(tokens.cuda(), labels.cuda()) for tokens, labels in made]

    with (
        torch.device("cuda", torch.cuda.current_device()),
        mock.patch.object(training, "_batches", batches),
    ):
        yield


@contextlib.contextmanager
def _forgetting() -> Iterator[None]:
    """Scope in which Adam's moments and its step count are reset to zero where a run would be resumed."""
    step_of = training._step

    def step(run: Run, number: int) -> Step:
        if number == SAVED_AT:
            for each in run.optimizer.chained_optimizers:
                for state in each.optimizer.state.values():
                    for tensor in state.values():
                        tensor.zero_()
        return step_of(run, number)

    with mock.patch.object(training, "_step", step):
        yield


def everything(folder: Path, lr: float) -> None:
    """Reshard and resume, place by place."""
    for name, place in PLACES.items():
        here = folder / name
        here.mkdir(parents=True)
        if place.source:
            for form in FORMS:
                _reshard(folder / place.source / form, here / form, place.layout)
        _run(
            "-m",
            "torch.distributed.run",
            *RENDEZVOUS,
            f"--nproc-per-node={place.ranks}",
            "-m",
            "benchmarks.resume",
            folder,
            name,
            f"--lr={lr}",
        )


def _reshard(source: Path, destination: Path, layout: Layout) -> None:
    sizes = [f"--tp={layout.tp}", f"--pp={layout.pp}", *([f"--vpp={layout.vpp}"] if layout.vpp else [])]
    _run("-m", "mcore_convert", "reshard", "--quiet", source, destination, *sizes)


def _run(*words: str | Path) -> None:
    # cuBLAS is deterministic with a workspace of fixed size; gloo would otherwise resolve the name of the host
    chosen = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    start = time.perf_counter()
    subprocess.run([sys.executable, *words], env=chosen | os.environ, check=True)
    shown = " ".join(str(word) for word in words if not str(word).startswith("--rdzv"))
    print(f"{time.perf_counter() - start:.0f} s: {shown}", file=sys.stderr, flush=True)


def tables(folder: Path) -> str:
    """Return the losses of each form, and their differences from those of the uninterrupted run, in Markdown."""
    losses_of: dict[str, dict[str, list[float]]] = {
        name: json.loads((folder / name / "losses.json").read_text()) for name in PLACES
    }
    first, last = slice(SAVED_AT), slice(SAVED_AT, UNTIL)
    wanted = losses_of[SAVED][UNINTERRUPTED]

    def furthest(losses: Sequence[float], steps: slice) -> str:
        return f"{max(abs(a - b) for a, b in zip(losses, wanted[steps], strict=True)):.1e}"

    lines: list[str] = []
    titles = [place.title for place in PLACES.values()]
    for form in FORMS:
        rows = zip(range(SAVED_AT, UNTIL), wanted[last], *(each[form] for each in losses_of.values()), strict=True)
        lines += [f"`{form}`:", "", _row("step", UNINTERRUPTED, *titles), _row(*["---:"] * (len(titles) + 2))]
        lines += [_row(str(step), *(f"{loss:.5f}" for loss in losses)) for step, *losses in rows]
        lines += [""]
    lines.append(_row("largest difference", *(f"`{form}`" for form in FORMS), "from step 0: first half", "second half"))
    lines.append(_row("---", *["---:"] * (len(FORMS) + 2)))
    for name, place in PLACES.items():
        alone = losses_of[name][UNINTERRUPTED]
        resumed = [furthest(losses_of[name][form], last) for form in FORMS]
        lines.append(_row(place.title, *resumed, furthest(alone[first], first), furthest(alone[last], last)))
    forgotten = furthest(losses_of[SAVED][FORGOTTEN][last], last)
    lines.append(_row("TP2 PP2, Adam's state zeroed at step 10", *["" for _ in FORMS], "", forgotten))
    return "\n".join(lines)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR", help="a folder to make, for checkpoints and losses")
    parser.add_argument("place", nargs="?", choices=PLACES, help=argparse.SUPPRESS)
    parser.add_argument("--lr", type=float, default=LR, help="learning rate (default: %(default)s)")
    options = parser.parse_args()
    if options.place:
        work(options.folder, options.place, options.lr)
        return 0
    everything(options.folder, options.lr)
    print(tables(options.folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
