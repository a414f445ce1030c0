"""`pretrain`: a whole run, from its configuration to its last checkpoint and its picture.

mcore-convert train CONFIG [key=value ...]
torchrun --nproc-per-node 4 -m train_entry CONFIG [key=value ...]
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from train_entry.config.compose import as_yaml
from train_entry.config.schema import Config
from train_entry.data.microbatches import Samples, microbatches
from train_entry.flows.base import Batch, rows_per_sample
from train_entry.initialize import together
from train_entry.report.profile import profiled
from train_entry.signals import StopRequest
from train_entry.train_valid_test_datasets_provider import train_valid_test_datasets_provider
from train_entry.trainer import Trainer


def pretrain(config: Config) -> None:
    """Train as the configuration says, on the ranks that are there; each of them calls this.

    Raises:
        ConvertError: something is refused: the configuration, the data, or a checkpoint.
    """
    with Trainer(config) as trainer, StopRequest(config.training.exit_after_minutes) as stop:
        trainer.initialize()
        trainer.setup_model_and_optimizer()
        trainer.report.say(as_yaml(config).strip())
        with together():
            data = train_valid_test_datasets_provider(
                config,
                trainer.args,
                trainer.tokenizer,
                samples_of(config),
                rows_per_sample=rows_per_sample(trainer.flow),
            )
        for remark in (beginning_of(trainer), *trainer.remarks, *data.notes):
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
        trainer.save()  # nothing is written twice
        if stop.reason is None:
            evaluate(trainer, "valid", data.valid)
            evaluate(trainer, "test", data.test)
        trainer.finish()
        if stop.reason is not None:
            trainer.report.say(f"stopped after step {state.iteration}: {stop.reason}; start it again to go on")


def samples_of(config: Config) -> tuple[int, int, int]:
    """How many samples the run takes of the data to train, validate and test on."""
    training = config.training
    size = training.global_batch_size
    return training.steps * size, training.eval_steps * size, training.eval_steps * size


def beginning_of(trainer: Trainer) -> str:
    """What the run starts from, in words."""
    path, iteration = trainer.restored.path, trainer.restored.iteration
    if path is None:
        return f"starts with new weights, from seed {trainer.config.training.seed}"
    if trainer.restored.training and iteration >= trainer.config.training.steps:
        steps = trainer.config.training.steps
        return f"finished already: {path} is of step {iteration} of {steps}; training.steps={2 * iteration} would go on"
    return f"goes on from step {iteration}, from {path}" if trainer.restored.training else f"starts from {path}"


def is_due(interval: int | None, iteration: int) -> bool:
    """Whether something that happens each `interval` steps happens now."""
    return interval is not None and iteration % interval == 0


def evaluate(trainer: Trainer, name: str, dataset: Samples | None) -> None:
    """Tell the loss of a data set, over the same samples each time."""
    steps = trainer.config.training.eval_steps
    if dataset is not None and steps:
        loss = trainer.evaluate(islice(batches_of(trainer, dataset, 0), steps))
        trainer.report.evaluation(trainer.state.iteration, name, loss)


def batches_of(trainer: Trainer, dataset: Samples, consumed_samples: int) -> Iterator[list[Batch]]:
    """This data-parallel rank's microbatches, step by step, without end."""
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
