"""Checks before anything starts, which refuse configurations that would silently train garbage, or fail late."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any

from mcore_convert.errors import ConfigError
from train_entry.config.inputs import has_start, problems_of_data, problems_of_start
from train_entry.config.layouts import problems_of_layout, problems_of_model, problems_of_ranks
from train_entry.config.named import is_named
from train_entry.config.schema import Config


def check(config: Config, world_size: int, device: str | None) -> None:
    """Refuse a run whose configuration cannot be carried out.

    Args:
        world_size: number of ranks.
        device: `cpu` or `cuda`; None if unknown, so that nothing is refused because of it.

    Raises:
        ConfigError: lists every reason, each with a remedy.
    """
    model = {name: value for name, value in config.model.model_dump().items() if value is not None}
    if config.model.num_layers and not has_start(config):  # otherwise `check_model` does, with the checkpoint
        model.setdefault("num_experts", None)
    _refuse(
        [
            *problems_of_ranks(config, world_size),
            *problems_of_layout(config),
            *problems_of_model(config, model),
            *problems_of_schedule(config),
            *problems_of_data(config),
            *problems_of_start(config),
            *problems_of_saving(config),
            *problems_of_computation(config, device),
            *problems_of_installation(config),
        ]
    )


def check_model(config: Config, args: Mapping[str, Any]) -> None:
    """Refuse a model that the layout cannot split, or that the run cannot export.

    Args:
        args: the run's arguments, including those of the checkpoint that it starts from.

    Raises:
        ConfigError: lists every reason.
    """
    _refuse([*problems_of_model(config, {"num_experts": None, **args}), *problems_of_export(config, args)])


def problems_of_schedule(config: Config) -> Iterator[str]:
    """Yield the problems of the learning-rate schedule."""
    optimizer, schedule, steps = config.optimizer, config.schedule, config.training.steps
    decay = schedule.decay_steps or steps
    if optimizer.min_lr > optimizer.lr:
        yield f"`optimizer.min_lr` = {optimizer.min_lr:g} is above `optimizer.lr` = {optimizer.lr:g}"
    if schedule.warmup_steps >= decay:
        end = f"`schedule.decay_steps` = {decay}" if schedule.decay_steps else f"`training.steps` = {steps}"
        yield (
            f"`schedule.warmup_steps` = {schedule.warmup_steps} is not below {end}: the learning rate would never be "
            "reached; for a short trial set it to 0"
        )
    if schedule.style == "inverse-square-root" and not schedule.warmup_steps:
        yield (
            "the inverse square root starts from the end of the warmup, and `schedule.warmup_steps` is 0: the learning "
            "rate would be nothing after the first step"
        )
    if schedule.style == "WSD" and schedule.wsd_decay_steps is None:
        yield "`schedule.wsd_decay_steps` is not given: how many steps the last phase of WSD has"
    elif schedule.style == "WSD" and (schedule.wsd_decay_steps or 0) > decay - schedule.warmup_steps:
        yield (
            f"`schedule.wsd_decay_steps` = {schedule.wsd_decay_steps} is more than the {decay - schedule.warmup_steps} "
            "steps after the warmup"
        )


def problems_of_saving(config: Config) -> Iterator[str]:
    """Yield the problems of saving checkpoints, and of the steps of evaluations."""
    checkpoint, training = config.checkpoint, config.training
    if not checkpoint.save:
        needing = {
            "save_interval": checkpoint.save_interval is not None,
            "keep_last": checkpoint.keep_last is not None,
            "asynchronous": checkpoint.asynchronous,
            "export_hf": checkpoint.export_hf != "never",
        }
        for name in (name for name, wanted in needing.items() if wanted):
            yield f"`checkpoint.{name}` = {getattr(checkpoint, name)} wants checkpoints, and `checkpoint.save` is false"
    elif checkpoint.keep_last is not None and checkpoint.save_interval is None:
        yield (
            f"`checkpoint.keep_last` = {checkpoint.keep_last} without `checkpoint.save_interval`: a run saves at its "
            "end only, and there is nothing to remove"
        )
    if training.eval_interval is not None and not training.eval_steps:
        yield "`training.eval_interval` is given and `training.eval_steps` is 0: nothing would be evaluated"


def problems_of_computation(config: Config, device: str | None) -> Iterator[str]:
    """Yield the problems of computing the model on this device."""
    training, parallel, model = config.training, config.parallel, config.model
    with_engine = training.transformer_impl == "transformer_engine"
    if device == "cpu" and training.precision == "fp16":
        yield "`training.precision` = fp16 is for GPUs: on a CPU take fp32, or bf16"
    if device == "cpu" and with_engine:
        yield "`training.transformer_impl` = transformer_engine is for GPUs: leave it at local"
    if with_engine and importlib.util.find_spec("transformer_engine") is None:
        yield (
            "`training.transformer_impl` = transformer_engine, and Transformer Engine is not installed: "
            "`pip install transformer-engine[pytorch]`, or leave it at local"
        )
    if with_engine and training.attention != "auto":
        yield f"`training.attention` = {training.attention} is for local layers; Transformer Engine has its own"
    if training.attention == "unfused" and parallel.cp > 1:
        yield "`training.attention` = unfused sees a rank's own part of the sequence only: with cp > 1 leave it at auto"
    if config.data.kind == "sft" and config.data.packed:
        if parallel.cp > 1:
            yield "`data.packed` examples would be cut apart by context parallelism: set it to false, or cp to 1"
        if with_engine:
            yield (
                "`data.packed` examples would see each other: Transformer Engine takes no mask beside its causal one; "
                "set it to false, or `training.transformer_impl` to local"
            )
    if training.compile == "layers" and model.num_experts:
        yield "`training.compile` = layers does not go with experts, whose batches change their size: leave it at auto"
    flow = training.flow if isinstance(training.flow, str) else training.flow.get("class", "")
    if isinstance(training.flow, dict) and not (isinstance(flow, str) and flow):
        yield "`training.flow` has options and no `class`: write {class: module:Class, OPTION: VALUE}"
    own = {"training.flow": str(flow), "data.dataset": config.data.dataset, "model.provider": model.provider}
    for key, text in own.items():
        if text and not is_named(text):
            yield f"`{key}` = {text} is not module:Class, as my_flows:Ranking"


def problems_of_installation(config: Config) -> Iterator[str]:
    """Yield the problems of missing packages, some of which a run needs only at its end."""
    logging = config.logging
    needed = {
        "tensorboard": (logging.tensorboard, "`logging.tensorboard` needs tensorboard"),
        "wandb": (logging.wandb, "`logging.wandb` needs wandb"),
        "matplotlib": (logging.plot, "`logging.plot` needs matplotlib"),
    }
    for package, (wanted, line) in needed.items():
        if wanted and importlib.util.find_spec(package) is None:
            yield f"{line}, which is not installed: `pip install {package}`, or set it to false"


def problems_of_export(config: Config, args: Mapping[str, Any]) -> Iterator[str]:
    """Yield the problem of a model that has no form for transformers."""
    from mcore_convert.checkpoints.families import of_arguments
    from mcore_convert.spec.config.arguments import normalise

    if config.checkpoint.export_hf == "never":
        return
    try:
        of_arguments(normalise(args))
    except ConfigError as error:
        reasons = "; ".join(error.items)
        yield f"`checkpoint.export_hf` = {config.checkpoint.export_hf}, but {error.message}: {reasons}"


def _refuse(problems: list[str]) -> None:
    if len(problems) == 1:
        raise ConfigError(f"this run is refused: {problems[0]}")
    if problems:
        raise ConfigError(f"this run is refused, for {len(problems)} reasons", items=problems)
