"""Training algorithms: how a batch goes through the model and what its loss is. `flow_of` finds that of a run."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from mcore_convert.errors import ConfigError
from train_entry.config.schema import Config
from train_entry.flows.base import Batch, Flow, Loss, rows_per_sample
from train_entry.flows.fine_tuning import FineTuning
from train_entry.flows.pretraining import Pretraining
from train_entry.flows.sequence import sum_over_sequence

__all__ = ["Batch", "FineTuning", "Flow", "Loss", "Pretraining", "flow_of", "rows_per_sample", "sum_over_sequence"]

OF_KIND: dict[str, type[Flow]] = {"mock": Pretraining, "indexed": Pretraining, "sft": FineTuning}
METHODS = ("forward", "loss")


def flow_of(config: Config) -> Flow:
    """The flow that a run names (`training.flow`), or that of its kind of data.

    Raises:
        ConfigError: there is no such class, it is no flow, or the batches of the run would tear its samples apart.
    """
    named = config.training.flow
    flow = (_class_of(named) if named else OF_KIND[config.data.kind])(config)
    _check_rows(flow, config)
    return flow


def _check_rows(flow: Flow, config: Config) -> None:
    """Refuse microbatches that do not have whole samples; the global batch has whole microbatches."""
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


def _class_of(named: str) -> type[Flow]:
    module_name, colon, class_name = named.partition(":")
    if not (colon and module_name and class_name):
        raise ConfigError(f"`training.flow` = `{named}` names no class", hint="write module:Class, as my_flows.dpo:Dpo")
    here = str(Path.cwd())
    if here not in sys.path:  # as `python -m` has it: a flow may lie where the run is started
        sys.path.insert(0, here)
    try:
        found = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # a module that theirs needs
        raise ConfigError(
            f"`training.flow` = `{named}`: there is no module `{error.name}`",
            hint=f"it is looked for in {here} and where Python finds packages (PYTHONPATH)",
        ) from error
    flow = found
    for name in class_name.split("."):
        flow = getattr(flow, name, None)  # type: ignore[assignment]
    if not isinstance(flow, type):
        raise ConfigError(f"`training.flow` = `{named}`: `{module_name}` has no class `{class_name}`")
    missing = [name for name in METHODS if not callable(getattr(flow, name, None))]
    if missing:
        raise ConfigError(
            f"`training.flow` = `{named}` is no flow",
            items=[f"it has no method `{name}`" for name in missing],
            hint="train_entry/flows/base.py says what a flow has",
        )
    return flow
