"""`train_valid_test_datasets_provider`: the data sets of a run, by the kind of data that its configuration names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from train_entry.config.schema import Config
from train_entry.data.indexed import indexed_datasets
from train_entry.data.microbatches import Samples
from train_entry.data.mock import mock_datasets
from train_entry.data.own import own_datasets
from train_entry.data.sft import sft_datasets
from train_entry.data.tokenizer import Tokenizer, check_fits


@dataclass(frozen=True)
class Datasets:
    """Data sets to train, validate and test with; None if no samples were requested. `notes` are for the user."""

    train: Samples | None
    valid: Samples | None
    test: Samples | None
    notes: tuple[str, ...] = ()


def train_valid_test_datasets_provider(
    config: Config,
    args: Mapping[str, Any],
    tokenizer: Tokenizer | None,
    num_samples: tuple[int, int, int],
    *,
    rows_per_sample: int = 1,
) -> Datasets:
    """Open the data of a run, on each rank. Results that can be kept are computed by rank 0 before the others.

    Args:
        args: the run's arguments under Megatron-LM's names, used for the model's vocabulary.
        tokenizer: that of the run. `sft` needs one; mock and indexed data do not.
        num_samples: minimum numbers of samples to train, validate and test with.
        rows_per_sample: consecutive examples of `sft` that stay together.

    Raises:
        DataError: data are missing, damaged, too few, or not for this model or tokenizer; on every rank.
    """
    vocab_size = args.get("vocab_size") or args["padded_vocab_size"]
    if tokenizer is not None:
        check_fits(tokenizer, vocab_size)
    notes: tuple[str, ...] = ()
    datasets: list[Any]
    if config.data.dataset:
        datasets = own_datasets(config, tokenizer, num_samples)
    elif config.data.kind == "mock":
        datasets = [*mock_datasets(config, vocab_size, num_samples)]
    elif config.data.kind == "indexed":
        datasets, notes = indexed_datasets(config, vocab_size, tokenizer, num_samples)
    else:
        datasets, notes = sft_datasets(config, tokenizer, num_samples, rows_per_sample)
    train, valid, test = datasets
    return Datasets(train, valid, test, notes)
