"""A run that was checked before anything starts: its arguments, tokenizer and flow. A dry run makes the same checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from train_entry.arguments import megatron_arguments
from train_entry.checkpoints import Source, source_of
from train_entry.config.named import named
from train_entry.config.refusals import check, check_model
from train_entry.config.schema import Config
from train_entry.data.indexed import vocab_size_of
from train_entry.data.tokenizer import Tokenizer, check_fits, tokenizer_of
from train_entry.flows import Flow, flow_of
from train_entry.model_provider import provider_of


@dataclass(frozen=True)
class Checked:
    """Result of checking a configuration. `args` are Megatron-LM's; `vocabulary` states its size and origin.

    `source` is the checkpoint that the run starts from, open; None for new weights.
    """

    args: dict[str, Any]
    tokenizer: Tokenizer | None
    flow: Flow
    vocabulary: str
    source: Source | None


def checked(config: Config, world_size: int, device: str | None) -> Checked:
    """Check a run as far as possible without other ranks.

    Args:
        world_size: ranks of the run.
        device: `cpu` or `cuda`; None if unknown, so that nothing is refused because of it.

    Raises:
        ConvertError: the run is refused.
    """
    check(config, world_size, device)
    source = source_of(config)
    origin = None if source is None else source.model
    tokenizer = tokenizer_of(config, origin)
    indexed = config.data.kind == "indexed" and not config.data.dataset
    of_data = vocab_size_of(config.data) if indexed and tokenizer is None else None
    vocab_size = tokenizer.vocab_size if tokenizer else of_data
    args = megatron_arguments(config, origin, vocab_size=vocab_size)
    check_model(config, args)
    if tokenizer is not None:
        check_fits(tokenizer, args["vocab_size"])
    if config.data.dataset:
        named("data.dataset", config.data.dataset)
    provider_of(config)
    if origin is not None:
        basis = "of the checkpoint"
    elif config.model.vocab_size is not None:
        basis = "of `model.vocab_size`"
    elif tokenizer is not None:
        basis = f"of the tokenizer `{tokenizer.name}`"
    else:
        basis = "of the tokenizer of the data" if of_data else "of `model.default_vocab_size`: no tokenizer is named"
    vocabulary = f"vocabulary: {args['vocab_size']:,} tokens, {basis}; {args['padded_vocab_size']:,} rows"
    return Checked(args, tokenizer, flow_of(config), vocabulary, source)
