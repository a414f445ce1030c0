"""`Trainer`: a run step by step, for users with a loop or data of their own; `pretrain` is the built-in loop."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from mcore_convert.errors import ConvertError
from mcore_convert.megatron.parallel import model_parallel
from train_entry.checked import checked
from train_entry.checkpoints import Checkpoints, Restored, Source
from train_entry.config.compose import as_yaml
from train_entry.config.schema import Config
from train_entry.data.microbatches import check_whole, deal
from train_entry.data.tokenizer import Tokenizer
from train_entry.flows import needs_reference, rows_per_sample
from train_entry.flows.base import Batch, Flow
from train_entry.global_vars import set_global_variables
from train_entry.initial_weights import draw_weights
from train_entry.initialize import begin_streams, named_groups, process_group, together
from train_entry.model.choices import select
from train_entry.model_provider import frozen, model_provider, own_stages, provider_of
from train_entry.optimizer.build import build_optimizer, build_scheduler, wrap
from train_entry.optimizer.foreach import foreach_optimizers, fuse
from train_entry.optimizer.torch_adam import torch_adam_goes_on
from train_entry.report.flops import flops_per_token
from train_entry.report.metrics import StepMetrics
from train_entry.report.phases import Phases
from train_entry.report.report import Report
from train_entry.schedule import Schedule
from train_entry.scopes import deterministic, evaluating, parameters_gathered, quiet
from train_entry.state import TrainState


class Trainer:
    """Run on this rank. Every rank makes one from the same configuration and calls the same methods.

    After `initialize()` it has `rank`, `world_size` and `device`, and for each of `tp`, `pp`, `dp`, `cp` and `ep` the
    rank, size and group: `tp_rank`, `pp_size`, `dp_group`. After `setup_model_and_optimizer()` it has `state`.

        with Trainer(config) as trainer:
            trainer.initialize()
            trainer.setup_model_and_optimizer()
            for batch in batches:  # of tensors [global_batch_size, seq_length], the same on every rank
                trainer.train(batch)
                trainer.log_last_metrics()
            trainer.save()
    """

    rank: int
    world_size: int
    device: torch.device
    tp_rank: int
    tp_size: int
    tp_group: dist.ProcessGroup
    pp_rank: int
    pp_size: int
    pp_group: dist.ProcessGroup
    dp_rank: int
    dp_size: int
    dp_group: dist.ProcessGroup
    cp_rank: int
    cp_size: int
    cp_group: dist.ProcessGroup
    ep_rank: int
    ep_size: int
    ep_group: dist.ProcessGroup
    args: dict[str, Any]
    tokenizer: Tokenizer | None
    flow: Flow
    state: TrainState
    report: Report
    phases: Phases
    restored: Restored
    remarks: tuple[str, ...]
    _source: Source | None
    schedule: Schedule

    def __init__(
        self,
        config: Config,
        *,
        model_provider: Callable[..., Any] | None = None,
        forward_step: Callable[..., Any] | None = None,
    ) -> None:
        """Set up a run; a model provider and a `forward_step`, as in Megatron-LM, override the configured ones."""
        self.config = config
        self._model_provider, self._forward_step = model_provider, forward_step
        self.last: StepMetrics | None = None
        self._scope = contextlib.ExitStack()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if hasattr(self, "checkpoints"):
                # a checkpoint in progress is complete in itself, whatever failed since
                with contextlib.nullcontext() if error is None else contextlib.suppress(ConvertError):
                    self.checkpoints.finish()
        finally:
            self.close()

    def initialize(self) -> None:
        """Connect to the other ranks, set up the groups, and refuse an invalid configuration.

        Raises:
            ConvertError: the configuration is refused, with all its problems; on every rank.
        """
        config, parallel = self.config, self.config.parallel
        self.device = self._scope.enter_context(process_group(parallel.timeout_minutes))
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        with together():
            run = checked(config, self.world_size, self.device.type)
        self.args, self.tokenizer, self.flow = run.args, run.tokenizer, run.flow
        self.remarks, self._source = (run.vocabulary,), run.source
        self._scope.enter_context(quiet())
        self._scope.enter_context(deterministic(config.training.deterministic))
        self._scope.enter_context(
            model_parallel(
                parallel.tp,
                parallel.pp,
                parallel.vpp,
                parallel.ep,
                cp=parallel.cp,
                etp=parallel.etp,
                seed=config.training.seed,
                timeout_minutes=parallel.timeout_minutes,
            )
        )
        self._scope.enter_context(torch_adam_goes_on())
        self._scope.enter_context(foreach_optimizers())
        for name, group in named_groups().items():
            setattr(self, f"{name}_rank", group.rank())
            setattr(self, f"{name}_size", group.size())
            setattr(self, f"{name}_group", group)
        self.args |= {"world_size": self.world_size, "data_parallel_size": self.dp_size}
        set_global_variables(config, self.args, self.tokenizer)
        begin_streams(config.training.seed + 100 * self.pp_rank)

    def setup_model_and_optimizer(self) -> None:
        """Build the model, its optimizer and its schedule, and fill them: new, or from a checkpoint.

        Raises:
            ConvertError: the checkpoint is refused; on every rank.
        """
        with together():
            computation = select(self.config, self.args, self.device)
        provider = self._model_provider or provider_of(self.config)
        if provider is None:
            stages = model_provider(self.config, self.args, computation.choices)
            draw_weights(stages, self.args, self.config.training.seed)
            chunks = wrap(self.config, stages)
            computation.finish(chunks)
        else:
            chunks = wrap(self.config, own_stages(self.config, provider))
        optimizer = build_optimizer(self.config, chunks)
        compared = needs_reference(self.flow) and self._forward_step is None
        reference = frozen(self.config, self.args, computation.choices, provider) if compared else []
        self.schedule = Schedule(self.config, self.flow, chunks, self.device, self._forward_step, reference)
        self.state = TrainState(self.args, chunks, optimizer, build_scheduler(self.config, optimizer))
        self.checkpoints = Checkpoints(self.config)
        source, self._source = self._source, None
        self.restored = self.checkpoints.restore(self.state, source, reference)
        fuse(optimizer)  # after loading: a checkpoint brings the flags of the run that wrote it
        with together():
            report = Report(
                self.config,
                self.args,
                rank=self.rank,
                world_size=self.world_size,
                device=self.device,
                start=self.state.iteration,
            )
            if self.rank == 0:
                (self.config.run_dir / "config.yaml").write_text(as_yaml(self.config))
        self.report = self._scope.enter_context(report)
        self.phases = self.report.phases
        self.remarks += (*computation.remarks, *self.restored.notes)
        self._since = time.perf_counter()

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches per data-parallel rank in a global batch."""
        training = self.config.training
        return training.global_batch_size // (training.micro_batch_size * self.dp_size)

    def split(self, batch: Batch) -> list[Batch]:
        """Return this data-parallel rank's microbatches of a global batch: the ranks take one in turn.

        Raises:
            ConvertError: the batch has another size than `global_batch_size`.
        """
        sizes = (self.config.training.global_batch_size, self.config.training.micro_batch_size)
        return deal(batch, *sizes, dp_rank=self.dp_rank, dp_size=self.dp_size)

    def train(self, batch: Batch | Sequence[Batch]) -> StepMetrics:
        """Take one step of the optimizer.

        Args:
            batch: tensors `[global_batch_size, seq_length]`, the same on every rank; or this data-parallel rank's
                microbatches.

        Raises:
            ConvertError: the loss is not a number.
        """
        microbatches = self._microbatches(batch)
        state, samples, lr = self.state, self.config.training.global_batch_size, self.lr
        for chunk in state.model:
            chunk.zero_grad_buffer()
        state.optimizer.zero_grad()
        with self.phases("forward-backward"):
            sums = self.schedule(microbatches, forward_only=False)
        with self.phases("optimizer"):
            success, grad_norm, _ = state.optimizer.step()
        if success:
            state.scheduler.step(increment=samples)
        state.iteration += 1
        state.consumed_samples += samples
        tokens = samples * self.config.training.seq_length
        state.num_floating_point_operations += tokens * flops_per_token(self.args)
        count = max(sums["count"], 1.0)  # of tokens that count in the loss; a batch may have none
        loss = sums["total"] / count
        self.last = StepMetrics(
            iteration=state.iteration,
            loss=loss,
            grad_norm=None if grad_norm is None else float(grad_norm),
            lr=lr,
            num_tokens=tokens,
            num_samples=samples,
            seconds=self._lap(),
            skipped=not success,
            loss_scale=float(state.optimizer.get_loss_scale()) if self.config.training.precision == "fp16" else None,
            extra={name: value / count for name, value in sums.items() if name not in ("total", "count")},
        )
        if success and not math.isfinite(loss):
            self.log_last_metrics()
            with together():
                raise ConvertError(
                    f"the loss of step {state.iteration} is {loss}",
                    hint="lower the learning rate, or look at the data of this step; checkpoints are as they were",
                )
        return self.last

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch | Sequence[Batch]]) -> float:
        """Compute the loss per token over some global batches, without training."""
        total = count = 0.0
        with self._not_training("eval"), evaluating(self.state.model):
            for batch in batches:
                microbatches = self._microbatches(batch)
                sums = self.schedule(microbatches, forward_only=True)
                total, count = total + sums["total"], count + sums["count"]
        return total / max(count, 1.0)

    def _microbatches(self, batch: Batch | Sequence[Batch]) -> list[Batch]:
        """Return this rank's microbatches, each of whole samples."""
        given = self.split(batch) if isinstance(batch, Mapping) else list(batch)
        check_whole(given, rows_per_sample(self.flow))
        return given

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return float(next(group["lr"] for group in self.state.optimizer.param_groups))

    def log_last_metrics(self) -> None:
        """Report the last step, if the configuration asks for it."""
        if self.last is not None:
            self.report.step(self.last)

    def save(self) -> None:
        """Save a checkpoint of this step, with its Hugging Face form if each checkpoint is to have one.

        Raises:
            ConvertError: it cannot be written; earlier checkpoints are unchanged.
        """
        with self._not_training("save"), parameters_gathered(self.state.model):
            self.report.flush()
            self.checkpoints.save(self.state)
            if self.config.checkpoint.export_hf == "each":
                self.checkpoints.export()

    def finish(self) -> None:
        """Wait for checkpoints that are still being written, and write the Hugging Face form of the last one.

        Raises:
            ConvertError: one of them cannot be written.
        """
        self.checkpoints.finish()
        if self.config.checkpoint.export_hf == "end":
            self.report.draw()
            self.report.say(f"exported to {self.checkpoints.export()}")

    def close(self) -> None:
        """Draw the plot and leave the groups; also after a failure."""
        self._scope.close()

    def _lap(self) -> float:
        """Return the seconds since the previous step, including data loading, without phases outside of training."""
        now, since = time.perf_counter(), self._since
        self._since = now
        return now - since

    @contextlib.contextmanager
    def _not_training(self, phase: str) -> Iterator[None]:
        """Scope of a phase that does not count towards the time of a step."""
        start = time.perf_counter()
        with self.phases(phase):
            yield
        self._since += time.perf_counter() - start
