"""A run that was checked before anything starts: its arguments, tokenizer and flow. A dry run checks the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from train_entry.arguments import megatron_arguments, origin_of
from train_entry.config.refusals import check, check_model
from train_entry.config.schema import Config
from train_entry.data.indexed import vocab_size_of
from train_entry.data.tokenizer import Tokenizer, check_fits, tokenizer_of
from train_entry.flows import Flow, flow_of


@dataclass(frozen=True)
class Checked:
    """What a configuration comes to. `args` are Megatron-LM's; `vocabulary` says how large it is, and after what."""

    args: dict[str, Any]
    tokenizer: Tokenizer | None
    flow: Flow
    vocabulary: str


def checked(config: Config, world_size: int, device: str | None) -> Checked:
    """Check a run as far as that needs no other rank.

    Args:
        world_size: ranks of the run.
        device: `cpu` or `cuda`; None where it is not known, and nothing is refused for it.

    Raises:
        ConvertError: the run is refused.
    """
    check(config, world_size, device)
    origin = origin_of(config)
    tokenizer = tokenizer_of(config, origin)
    of_data = None if tokenizer or config.data.kind != "indexed" else vocab_size_of(config.data)
    vocab_size = tokenizer.vocab_size if tokenizer else of_data
    args = megatron_arguments(config, origin, vocab_size=vocab_size)
    check_model(config, args)
    if tokenizer is not None:
        check_fits(tokenizer, args["vocab_size"])
    if origin is not None:
        source = "of the checkpoint"
    elif config.model.vocab_size is not None:
        source = "of `model.vocab_size`"
    elif tokenizer is not None:
        source = f"of the tokenizer `{tokenizer.name}`"
    else:
        source = "of the tokenizer of the data" if of_data else "of `model.default_vocab_size`: no tokenizer is named"
    vocabulary = f"vocabulary: {args['vocab_size']:,} tokens, {source}; {args['padded_vocab_size']:,} rows"
    return Checked(args, tokenizer, flow_of(config), vocabulary)
