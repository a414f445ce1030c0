"""Globals for the code of Megatron users: the arguments, the tokenizer and a `TransformerConfig`.

The names are those of `megatron.training`, which is not part of Megatron Core. They are available from
`Trainer.initialize()` on.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from train_entry.forward_step import on_this_rank
from train_entry.model_provider import DTYPES, settings_of

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

    from train_entry.config.schema import Config
    from train_entry.data.tokenizer import Tokenizer
    from train_entry.flows.base import Batch

_run: dict[str, Any] = {}


def set_global_variables(config: Config, args: dict[str, Any], tokenizer: Tokenizer | None) -> None:
    """Set the run that the globals describe."""
    _run.update(config=config, args=Namespace(**args), tokenizer=tokenizer)


def get_args() -> Namespace:
    """Return the arguments of the run under Megatron-LM's names."""
    return _of_run("args")  # type: ignore[no-any-return]


def get_tokenizer() -> Tokenizer | None:
    """Return the tokenizer of the run; None if it has none."""
    return _of_run("tokenizer")  # type: ignore[no-any-return]


def core_transformer_config_from_args(args: Namespace) -> TransformerConfig:
    """Return Megatron Core's configuration of the run's model, as `model_provider` here makes it."""
    from mcore_convert.megatron.config import config_of

    config = _of_run("config")
    return config_of(vars(args), dtype=DTYPES[config.training.precision], settings=settings_of(config, vars(args)))


def get_batch(data_iterator: Iterator[Batch]) -> Batch:
    """Return the next microbatch, on this rank's device, with its part of each sequence under context parallelism."""
    return on_this_rank(next(data_iterator))


def _of_run(name: str) -> Any:
    if name not in _run:
        raise RuntimeError(f"there is no run yet whose {name} could be asked for: call this from a provider")
    return _run[name]
