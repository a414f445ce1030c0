"""Samples as batches: the samples of each rank at each step, and loading them ahead in other processes."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from mcore_convert.errors import ConvertError, DataError

if TYPE_CHECKING:
    from train_entry.config.schema import Config
    from train_entry.flows.base import Batch


class Samples(Protocol):
    """Data set: sample i as tensors of `[seq_length]`, in the order of training."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Mapping[str, Any]: ...


def microbatches(
    dataset: Samples,
    config: Config,
    *,
    consumed_samples: int,
    dp_rank: int,
    dp_size: int,
    rows_per_sample: int = 1,
) -> Iterator[Batch]:
    """Return this data-parallel rank's microbatches without end, from a position in the data on.

    Sample k of the run is `dataset[k]`, and after its end the data set begins again. The ranks take the microbatches of
    each global batch in turn, as in Megatron-LM: the samples of a step do not depend on the layout.

    Args:
        consumed_samples: samples that the run has trained on before. An evaluation begins at 0, so that each uses the
            same samples.
        rows_per_sample: number of consecutive items of the data set that belong together. An incomplete group at its
            end
            is left out.

    Raises:
        DataError: the data set is empty.
    """
    whole = len(dataset) // rows_per_sample * rows_per_sample
    if not whole:
        raise DataError("there is not one sample in the data")
    training = config.training
    first = -(-consumed_samples // rows_per_sample) * rows_per_sample
    share = Share(whole, first, training.global_batch_size, training.micro_batch_size, dp_rank, dp_size)
    if not config.data.num_workers:
        return (stack([dataset[index] for index in indices]) for indices in share)
    return _loaded(dataset, share, config.data.num_workers)


@dataclass(frozen=True)
class Share:
    """Indices of the samples in each microbatch of a rank, without end."""

    num_samples: int
    first: int
    global_batch_size: int
    micro_batch_size: int
    dp_rank: int
    dp_size: int

    def __iter__(self) -> Iterator[list[int]]:
        step = self.first
        width = self.micro_batch_size * self.dp_size
        while True:
            for turn in range(step, step + self.global_batch_size, width):
                mine = turn + self.dp_rank * self.micro_batch_size
                yield [index % self.num_samples for index in range(mine, mine + self.micro_batch_size)]
            step += self.global_batch_size


def deal(batch: Batch, global_batch_size: int, micro_batch_size: int, *, dp_rank: int, dp_size: int) -> list[Batch]:
    """Return a data-parallel rank's microbatches of a given global batch: those that `Share` assigns to it.

    Raises:
        ConvertError: the batch has another size.
    """
    sizes = {name: len(tensor) for name, tensor in batch.items()}
    if set(sizes.values()) != {global_batch_size}:
        raise ConvertError(
            f"a batch has {global_batch_size} samples (`training.global_batch_size`)",
            items=[f"`{name}` has {size}" for name, size in sizes.items()],
        )
    parts = {name: tensor.split(micro_batch_size) for name, tensor in batch.items()}
    turns = range(dp_rank, global_batch_size // micro_batch_size, dp_size)
    return [{name: part[turn] for name, part in parts.items()} for turn in turns]


def check_whole(batches: Sequence[Batch], rows_per_sample: int) -> None:
    """Refuse microbatches that split rows of one sample.

    Raises:
        ConvertError: one of them does.
    """
    if any(len(tensor) % rows_per_sample for batch in batches for tensor in batch.values()):
        raise ConvertError(f"a microbatch has a multiple of {rows_per_sample} rows (`rows_per_sample` of the flow)")


def stack(samples: Sequence[Mapping[str, Any]]) -> Batch:
    """Return samples as one batch, with tensors only: Megatron's index of a blend's data set is left out."""
    names = [name for name, value in samples[0].items() if isinstance(value, Tensor)]
    return {name: torch.stack([sample[name] for sample in samples]) for name in names}


def _loaded(dataset: Samples, share: Share, num_workers: int) -> Iterator[Batch]:
    """Yield the same microbatches, loaded ahead by other processes, which end with the iterator."""
    loader: DataLoader[Any] = DataLoader(
        dataset,  # type: ignore[arg-type]
        batch_sampler=share,
        num_workers=num_workers,
        collate_fn=stack,
        pin_memory=torch.cuda.is_available(),
        worker_init_fn=_leave_signals_to_the_run,
    )
    yield from loader


def _leave_signals_to_the_run(worker: int) -> None:
    """Ignore signals to the whole job: they ask the run to save and end, which its loaders must outlive; they end with
    it.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
