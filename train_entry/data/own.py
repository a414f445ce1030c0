"""Data sets of the user, by a class that `data.dataset` names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from mcore_convert.errors import DataError
from train_entry.config.named import named
from train_entry.data.splits import NAMES

if TYPE_CHECKING:
    from train_entry.config.schema import Config
    from train_entry.data.microbatches import Samples
    from train_entry.data.tokenizer import Tokenizer


def own_datasets(
    config: Config, tokenizer: Tokenizer | None, num_samples: tuple[int, int, int]
) -> list[Samples | None]:
    """Return the data sets to train, validate and test with; None if no samples are requested, or the class has none.

    The class is called as `Class(config, split, num_samples, tokenizer)`, with `train`, `valid` or `test` as the split.
    Item i is row i of the run, a mapping of tensors `[seq_length]`: `tokens`, `labels`, `loss_mask` and `position_ids`
    for the built-in flows, and any others that another flow reads. Rows that form one sample of a flow are
    consecutive.

    Raises:
        ConfigError: there is no such class.
        DataError: its first item is not a row of `training.seq_length`, or a requested split has none.
    """
    made = named("data.dataset", config.data.dataset)
    datasets: list[Samples | None] = []
    for split, count in zip(NAMES, num_samples, strict=True):
        dataset = made(config, split, count, tokenizer) if count else None
        if dataset is not None:
            check_rows(dataset, config.training.seq_length, f"`data.dataset` = `{config.data.dataset}`, {split}")
        elif count and split == "train":
            raise DataError(f"`data.dataset` = `{config.data.dataset}` has nothing to train with")
        datasets.append(dataset)
    return datasets


def check_rows(dataset: Samples, seq_length: int, name: str) -> None:
    """Prove by its first item that a data set has rows that can be batched.

    Raises:
        DataError: it does not.
    """
    if not len(dataset):
        raise DataError(f"{name}: there is not one row")
    row = dataset[0]
    tensors = {key: value for key, value in row.items() if isinstance(value, Tensor)} if hasattr(row, "items") else {}
    if not tensors:
        raise DataError(f"{name}: item 0 is no mapping of tensors, but {type(row).__name__}")
    wrong = [f"`{key}` is {list(tensor.shape)}" for key, tensor in tensors.items() if tensor.shape[:1] != (seq_length,)]
    if wrong:
        raise DataError(f"{name}: item 0 has other sizes than `training.seq_length` = {seq_length}", items=wrong)
