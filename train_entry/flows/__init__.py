"""Training algorithms: how a batch passes through the model and what its loss is. `flow_of` returns that of a run."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from mcore_convert.errors import ConfigError
from mcore_convert.text.names import meant
from train_entry.config.named import named
from train_entry.config.nearest import nearest
from train_entry.config.schema import Config
from train_entry.flows.base import Batch, Flow, Loss, needs_reference, rows_per_sample
from train_entry.flows.fine_tuning import FineTuning
from train_entry.flows.pretraining import Pretraining
from train_entry.flows.sequence import sum_over_sequence

__all__ = [
    "Batch",
    "FineTuning",
    "Flow",
    "Loss",
    "Pretraining",
    "flow_of",
    "needs_reference",
    "rows_per_sample",
    "sum_over_sequence",
]

OF_KIND: dict[str, type[Flow]] = {"mock": Pretraining, "indexed": Pretraining, "sft": FineTuning}
METHODS = ("forward", "loss")


def flow_of(config: Config) -> Flow:
    """Return the flow that a run names (`training.flow`), or that of its kind of data.

    Raises:
        ConfigError: there is no such class, it is not a flow, or the run's batches would split its samples.
    """
    given = config.training.flow
    options = {"class": given} if isinstance(given, str) else dict(given)
    text = options.pop("class", "")
    chosen: Any = _class_of(text) if text else OF_KIND[config.data.kind]
    flow: Flow = chosen(config, *_options_of(chosen, text, options))
    _check_rows(flow, config)
    if needs_reference(flow) and config.checkpoint.init is None:
        raise ConfigError(
            f"the flow `{type(flow).__qualname__}` compares with a reference model, and none is named",
            hint="`checkpoint.init` names the weights that it has, and that training starts from",
        )
    return flow


def _options_of(flow: Any, text: str, options: dict[str, Any]) -> list[Any]:
    """Return the arguments of a flow after the configuration: its `Options`, a pydantic model, if it has one.

    Raises:
        ConfigError: names every option that does not exist or has a wrong value.
    """
    model = getattr(flow, "Options", None)
    known = list(model.model_fields) if model is not None else []
    problems = []
    for name in options:
        if name not in known:
            problems.append(f"there is no `training.flow.{name}`{meant(nearest(name, known))}")
    if model is None and not problems:
        return []
    try:
        made = (
            None if model is None else model.model_validate({name: options[name] for name in options if name in known})
        )
    except ValidationError as error:
        for each in error.errors(include_url=False):
            key = ".".join(map(str, each["loc"]))
            problems.append(f"`training.flow.{key}` = {each['input']!r}: {each['msg'][:1].lower()}{each['msg'][1:]}")
    if problems:
        there = f"its options: {', '.join(known)}" if known else "it has no options: a class `Options` would say which"
        raise ConfigError(f"the options of the flow `{text}` are not what it takes", items=problems, hint=there)
    return [made]


def _check_rows(flow: Flow, config: Config) -> None:
    """Refuse microbatches without whole samples; the global batch has whole microbatches."""
    name, rows, micro = type(flow).__qualname__, rows_per_sample(flow), config.training.micro_batch_size
    if not isinstance(rows, int) or isinstance(rows, bool) or rows < 1:
        raise ConfigError(f"`rows_per_sample` = {rows!r} of the flow `{name}` is not a whole number from 1")
    if micro % rows:
        raise ConfigError(
            f"`training.micro_batch_size` = {micro} is no multiple of {rows}: a sample of the flow `{name}` is {rows} "
            "rows (`rows_per_sample`), which stay together",
            hint=f"set it to {-(-micro // rows) * rows}; `training.global_batch_size` counts rows, too",
        )
    if rows > 1 and config.data.kind == "sft" and config.data.packed:
        raise ConfigError(
            f"a sample of the flow `{name}` is {rows} rows, and packed rows have several examples each",
            hint="set `data.packed` to false",
        )


def _class_of(text: str) -> type[Flow]:
    flow: type[Flow] = named("training.flow", text, kind=type)
    missing = [name for name in METHODS if not callable(getattr(flow, name, None))]
    if missing:
        raise ConfigError(
            f"`training.flow` = `{text}` is no flow",
            items=[f"it has no method `{name}`" for name in missing],
            hint="train_entry/flows/base.py says what a flow has",
        )
    return flow
