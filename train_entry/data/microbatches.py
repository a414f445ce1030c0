"""Samples as batches: which rank takes which samples at which step, and loading them ahead in other processes."""

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
    """A data set: sample i as tensors of `[seq_length]`, in the order in which they are trained on."""

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

    Sample k of the run is `dataset[k]`, and from its end on the data set begins anew. Of each global batch the ranks
    take turns, a microbatch each, as in Megatron-LM: no layout changes which samples a step is trained on.

    Args:
        consumed_samples: samples that the run has trained on before. An evaluation begins at 0, so that each sees the
            same samples.
        rows_per_sample: items of the data set that belong together, from its beginning on. What is left at its end is
            not taken.

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
    """The numbers of the samples in each microbatch of a rank, without end."""

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
    """Return a data-parallel rank's microbatches of a global batch at hand: those that `Share` gives it.

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
    """Refuse microbatches that tear apart what belongs together.

    Raises:
        ConvertError: one of them does.
    """
    if any(len(tensor) % rows_per_sample for batch in batches for tensor in batch.values()):
        raise ConvertError(f"a microbatch has a multiple of {rows_per_sample} rows (`rows_per_sample` of the flow)")


def stack(samples: Sequence[Mapping[str, Any]]) -> Batch:
    """Samples as one batch. What is no tensor, as Megatron's number of a data set in its blend, is left out."""
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
    """Ignore signals to the whole job, which ask the run to save and end. Its loaders must outlast that, and end with
    it.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
