"""`pretrain`: a whole run, from its configuration to its last checkpoint and its plot.

mcore-convert train CONFIG [key=value ...]
torchrun --nproc-per-node 4 -m train_entry CONFIG [key=value ...]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, overload

from mcore_convert.errors import DataError
from train_entry.command_line import run
from train_entry.config.compose import as_yaml
from train_entry.config.schema import Config
from train_entry.data.microbatches import Samples, microbatches
from train_entry.data.own import check_rows
from train_entry.data.splits import NAMES
from train_entry.flows.base import Batch, rows_per_sample
from train_entry.initialize import together
from train_entry.report.profile import profiled
from train_entry.signals import StopRequest
from train_entry.train_valid_test_datasets_provider import Datasets, train_valid_test_datasets_provider
from train_entry.trainer import Trainer

DatasetsProvider = Callable[[list[int]], Sequence[Samples | None]]


@overload
def pretrain(config: Config, /) -> None: ...


@overload
def pretrain(
    train_valid_test_datasets_provider: DatasetsProvider,
    model_provider: Callable[..., Any],
    model_type: Any,
    forward_step_func: Callable[..., Any],
    /,
    *,
    config: Config | None = None,
) -> None: ...


def pretrain(
    first: Config | DatasetsProvider,
    model_provider: Callable[..., Any] | None = None,
    model_type: Any = None,
    forward_step_func: Callable[..., Any] | None = None,
    /,
    *,
    config: Config | None = None,
) -> None:
    """Train by a configuration on all ranks of the process group; each of them calls this.

    Or with the user's own providers, in Megatron-LM's order and meaning (megatron/training/training.py, 0.16.1), by a
    configuration or by the command line of the script: `torchrun pretrain_gpt.py CONFIG [key=value ...]`, which then
    ends the process with a line and an exit code if something is refused.

    Args:
        train_valid_test_datasets_provider: called with the numbers of samples to train, validate and test with; returns
            a data set for each, or None. Item i is row i of the run, a mapping of tensors `[seq_length]`.
        model_provider: called with `pre_process` and `post_process`, and `vp_stage` for virtual stages; returns the
            stage. Its weights are kept, unless the run starts from a checkpoint.
        model_type: Megatron Core's `ModelType`, whose only value is now `encoder_or_decoder`.
        forward_step_func: called with an iterator over microbatches and the model; returns the output and a function
            from it to `(loss, num_tokens, report)`: a sum, its number, and further sums. Microbatches are whole:
            `train_entry.global_vars.get_batch` returns this rank's part of them. How its loss adds up is not checked.

    Raises:
        ConvertError: the configuration, the data, or a checkpoint is refused.
    """
    if isinstance(first, Config):
        _pretrain(first)
        return
    provider = first

    def train(config: Config) -> None:
        _pretrain(config, provider, model_provider, forward_step_func)

    if config is not None:
        train(config)
    elif code := run(sys.argv[1:], train, f"{sys.argv[0]} CONFIG [key=value ...]"):
        sys.exit(code)


def _pretrain(
    config: Config,
    datasets_provider: DatasetsProvider | None = None,
    model_provider: Callable[..., Any] | None = None,
    forward_step: Callable[..., Any] | None = None,
) -> None:
    own = Trainer(config, model_provider=model_provider, forward_step=forward_step)
    with own as trainer, StopRequest(config.training.exit_after_minutes) as stop:
        trainer.initialize()
        trainer.setup_model_and_optimizer()
        trainer.report.say(as_yaml(config).strip())
        with together():
            data = datasets_of(trainer, datasets_provider)
        vocabulary, *remarks = trainer.remarks
        for remark in (vocabulary, beginning_of(trainer), *remarks, *data.notes):
            trainer.report.say(remark)
        state, training = trainer.state, config.training
        batches = batches_of(trainer, data.train, state.consumed_samples) if data.train is not None else iter(())
        trace = config.run_dir / f"trace-{trainer.rank}.json" if config.logging.profile else None
        with profiled(trace) as stepped:
            while state.iteration < training.steps:
                with trainer.phases("data"):
                    batch = next(batches)
                trainer.train(batch)
                trainer.log_last_metrics()
                stepped()
                if stop.agreed(trainer.device):
                    break
                if is_due(training.eval_interval, state.iteration) and state.iteration < training.steps:
                    evaluate(trainer, "valid", data.valid)
                if is_due(config.checkpoint.save_interval, state.iteration):
                    trainer.save()
        trainer.save()  # no step is saved twice
        if stop.reason is None:
            evaluate(trainer, "valid", data.valid)
            evaluate(trainer, "test", data.test)
        trainer.finish()
        if stop.reason is not None:
            trainer.report.say(f"stopped after step {state.iteration}: {stop.reason}; start it again to go on")


def datasets_of(trainer: Trainer, provider: DatasetsProvider | None) -> Datasets:
    """Return the data sets of a run, from the user's provider if there is one.

    Raises:
        DataError: data are missing, or cannot be batched.
    """
    config = trainer.config
    if provider is None:
        return train_valid_test_datasets_provider(
            config,
            trainer.args,
            trainer.tokenizer,
            samples_of(config),
            rows_per_sample=rows_per_sample(trainer.flow),
        )
    train, valid, test = provider(list(samples_of(config)))
    datasets = Datasets(train, valid, test)
    for name, dataset in zip(NAMES, (datasets.train, datasets.valid, datasets.test), strict=True):
        if dataset is not None:
            check_rows(dataset, config.training.seq_length, f"the data set of the provider, {name}")
        elif name == "train":
            raise DataError("the provider of data sets has nothing to train with")
    return datasets


def samples_of(config: Config) -> tuple[int, int, int]:
    """Return the numbers of samples that the run needs to train, validate and test."""
    training = config.training
    size = training.global_batch_size
    return training.steps * size, training.eval_steps * size, training.eval_steps * size


def beginning_of(trainer: Trainer) -> str:
    """Return the start of the run in words."""
    path, iteration = trainer.restored.path, trainer.restored.iteration
    if path is None:
        return f"starts with new weights, from seed {trainer.config.training.seed}"
    if trainer.restored.training and iteration >= trainer.config.training.steps:
        steps = trainer.config.training.steps
        return f"finished already: {path} is of step {iteration} of {steps}; training.steps={2 * iteration} would go on"
    return f"goes on from step {iteration}, from {path}" if trainer.restored.training else f"starts from {path}"


def is_due(interval: int | None, iteration: int) -> bool:
    """Return whether an event that happens each `interval` steps happens at this one."""
    return interval is not None and iteration % interval == 0


def evaluate(trainer: Trainer, name: str, dataset: Samples | None) -> None:
    """Report the loss of a data set, over the same samples each time."""
    steps = trainer.config.training.eval_steps
    if dataset is not None and steps:
        loss = trainer.evaluate(islice(batches_of(trainer, dataset, 0), steps))
        trainer.report.evaluation(trainer.state.iteration, name, loss)


def batches_of(trainer: Trainer, dataset: Samples, consumed_samples: int) -> Iterator[list[Batch]]:
    """Yield this data-parallel rank's microbatches, step by step, without end."""
    each = microbatches(
        dataset,
        trainer.config,
        consumed_samples=consumed_samples,
        dp_rank=trainer.dp_rank,
        dp_size=trainer.dp_size,
        rows_per_sample=rows_per_sample(trainer.flow),
    )
    while True:
        yield list(islice(each, trainer.num_microbatches))
