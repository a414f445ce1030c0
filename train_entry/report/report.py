"""The report of a run: rank 0 shows and stores the metrics, every rank can write a message."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

import torch

from mcore_convert.checkpoints.metrics import METRICS
from mcore_convert.errors import ConfigError, UnwritableTarget
from train_entry.config.schema import Config
from train_entry.report.console import Console, write
from train_entry.report.flops import flops_per_token
from train_entry.report.jsonl import Jsonl
from train_entry.report.metrics import Evaluation, Interval, Rates, Step, StepMetrics, is_bad, memory_of
from train_entry.report.peak import peak_tflops
from train_entry.report.phases import Phases
from train_entry.report.rows import row_of_evaluation, rows_of
from train_entry.report.sink import Sink


class Report:
    """Report of a run, on each of its ranks; the calls are the same on all, and none waits for another rank.

    Metrics are buffered until a line is due: every `logging.interval` steps, and after the first and the last step.
        Only then does it wait for the device.
    """

    def __init__(
        self,
        config: Config,
        args: Mapping[str, Any],
        *,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | str = "cpu",
        start: int = 0,
        stream: TextIO | None = None,
    ) -> None:
        """Start, or continue after step `start`.

        Args:
            args: Megatron-LM's arguments of the run.
            stream: destination of messages; stderr unless given.

        Raises:
            ConfigError: a package that the configuration needs is not installed; on all ranks.
            UnwritableTarget: the run directory cannot be written to.
        """
        _require_packages(config)
        self.phases = Phases(device)
        self._config, self._rank, self._world_size, self._stream = config, rank, world_size, stream
        self._device = torch.device(device)
        self._rates = Rates(flops_per_token(args), world_size, _peak(config, self._device))
        self._waiting: list[StepMetrics] = []
        self._was_bad = False
        self._first: tuple[int, float] | None = None  # number and time of the first step
        self._sinks = self._open_sinks(start) if rank == 0 else []

    def step(self, metrics: StepMetrics) -> None:
        """Record a step; call it on every rank, after the step."""
        if not self._sinks:
            return
        self._waiting.append(metrics)
        is_first = self._first is None
        due = metrics.iteration % self._config.logging.interval == 0 or metrics.iteration == self._config.training.steps
        bad = is_bad(metrics)
        if is_first or due or (bad and not self._was_bad):  # the first of several bad steps is reported at once
            self.flush()
        if is_first:
            self._first = (metrics.iteration, time.monotonic())
        self._was_bad = bad

    def flush(self) -> None:
        """Show and store the buffered steps. Called before a checkpoint is saved, which may outlive this process."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        steps = [Step.of(metrics) for metrics in waiting]
        interval = Interval(
            steps=steps,
            speed=self._rates.speed(sum(step.num_tokens for step in steps), sum(step.seconds for step in steps)),
            memory=memory_of(self._device),
            phases=self.phases.read(),
            eta=self._eta(steps[-1].iteration),
        )
        rows = rows_of(interval, self._rates)
        for sink in self._sinks:
            sink.steps(interval, rows)

    def evaluation(
        self,
        iteration: int,
        name: str,
        loss: float,
        *,
        num_tokens: int | None = None,
        seconds: float | None = None,
        extra: Mapping[str, float] | None = None,
    ) -> None:
        """Record the loss per token of a data set, say `valid`, after a step."""
        self.flush()
        evaluation = Evaluation(iteration, name, float(loss), num_tokens, seconds, extra or {})
        for sink in self._sinks:
            sink.evaluation(evaluation, row_of_evaluation(evaluation))

    def say(self, text: str) -> None:
        """Write a message of the run, on rank 0 only."""
        if self._rank == 0:
            write(text, self._stream)

    def say_all(self, text: str) -> None:
        """Write a message of this rank, prefixed with the rank."""
        if self._world_size == 1:
            self.say(text)
        else:
            prefix = f"[rank {self._rank:>{len(str(self._world_size - 1))}}] "
            write("\n".join(prefix + line for line in text.splitlines()), self._stream)

    def close(self) -> None:
        """Show the buffered steps, close the sinks, and draw `loss.png`; a second call does nothing."""
        if not self._sinks:
            return
        try:
            self.flush()
        finally:
            sinks, self._sinks = self._sinks, []
            for sink in sinks:
                sink.close()
        picture = self._drawn()
        if picture is not None:
            self.say(f"loss curve: {picture}")

    def draw(self) -> None:
        """Draw `loss.png` up to the current step, for an export."""
        if self._sinks:
            self.flush()
            self._drawn()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except RuntimeError:  # the device with the numbers is lost: the error in progress says more
            if error is None:
                raise

    def _drawn(self) -> Path | None:
        if not self._config.logging.plot or not (self._config.run_dir / METRICS).stat().st_size:
            return None
        from train_entry.report.plot import plot

        return plot(self._config.run_dir)

    def _open_sinks(self, start: int) -> list[Sink]:
        folder, logging = self._config.run_dir, self._config.logging
        sinks: list[Sink] = [Console(self._config.training.steps, self._stream)]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            sinks.append(Jsonl(folder / METRICS, start=start))
            if logging.tensorboard:
                from train_entry.report.tensorboard import TensorBoard

                sinks.append(TensorBoard(folder / "tensorboard", start=start))
            if logging.wandb:
                from train_entry.report.wandb import Wandb

                sinks.append(Wandb(self._config, start=start))
        except ConfigError:
            for sink in sinks:
                sink.close()
            raise
        except OSError as error:
            raise UnwritableTarget(
                f"the run directory `{folder}` cannot be written to: {error.strerror or error}",
                hint="`run_dir=PATH` names another",
            ) from error
        return sinks

    def _eta(self, iteration: int) -> float | None:
        """Return the seconds until the last step, by the time since the first one, including all time between steps.

        The first step itself is not representative: it compiles, allocates and connects.
        """
        if self._first is None or iteration <= self._first[0]:
            return None
        first, then = self._first
        return (time.monotonic() - then) / (iteration - first) * (self._config.training.steps - iteration)


def _peak(config: Config, device: torch.device) -> float | None:
    """Return the peak of one device, from the configuration or as known."""
    if config.logging.peak_tflops is not None or device.type != "cuda":
        return config.logging.peak_tflops
    tf32 = torch.get_float32_matmul_precision() != "highest"
    return peak_tflops(torch.cuda.get_device_name(device), config.training.precision, tf32=tf32)


def _require_packages(config: Config) -> None:
    """Check that the packages that the configuration needs are installed, before training starts."""
    logging = config.logging
    wanted = {"tensorboard": logging.tensorboard, "wandb": logging.wandb, "plot": logging.plot}
    packages = {"tensorboard": ("tensorboard", "train"), "wandb": ("wandb", "wandb"), "plot": ("matplotlib", "train")}
    missing = [name for name, on in wanted.items() if on and importlib.util.find_spec(packages[name][0]) is None]
    if missing:
        extras = ",".join(sorted({packages[name][1] for name in missing}))
        raise ConfigError(
            "the configuration asks for packages that are not installed",
            items=[f"logging.{name}=true needs `{packages[name][0]}`" for name in missing],
            hint=f"`pip install 'mcore-convert[{extras}]'`, or turn them off: "
            + " ".join(f"logging.{name}=false" for name in missing),
        )
