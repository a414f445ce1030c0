"""Fine-tuning data: examples as samples of one length, one in each or several, in another order at each epoch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from mcore_convert.errors import DataError, counted
from mcore_convert.megatron.cpu import import_megatron
from train_entry.data.ranks import rank_0_first
from train_entry.data.sft_tokens import Examples, examples_of
from train_entry.data.splits import NAMES, Blend, blends_of, bounds_of, check_split, slice_of

if TYPE_CHECKING:
    from train_entry.config.schema import Config
    from train_entry.data.tokenizer import Tokenizer

Numbers = npt.NDArray[np.int64]


class Sft(Dataset[dict[str, Tensor]]):
    """Samples of `seq_length` tokens from examples, without end: each epoch has every example once, in its own order.

    An example of n tokens takes n - 1 places: each predicts the next. The part that does not fit into a sample is cut
    off. Packed samples hold as many examples as fit, one after the other, numbered from 1 in `segment_ids`; positions
    begin at 0 in each. The rest of a sample is `padding`, without loss, in segment 0.

    Examples that belong together (each `together` consecutive ones of their file) become consecutive samples.

    `dropped` examples have nothing to learn among the tokens that fit; `cut` ones are longer than a sample.
    """

    def __init__(
        self,
        files: Sequence[tuple[Examples, slice]],
        *,
        seq_length: int,
        packed: bool,
        padding: int,
        seed: tuple[int, ...],
        num_samples: int,
        together: int = 1,
    ) -> None:
        self.together = together
        self.tokens = [examples.tokens for examples, _ in files]
        self.seq_length, self.packed, self.padding = seq_length, packed, padding
        self.seed, self.num_samples = seed, num_samples
        chosen = [_places(examples, which, seq_length, together) for examples, which in files]
        self.file = np.repeat(np.arange(len(files)), [len(starts) for starts, _ in chosen])
        self.start = np.concatenate([starts for starts, _ in chosen])
        self.length = np.concatenate([lengths for _, lengths in chosen])
        self.cut = sum(int((examples.lengths()[which] - 1 > seq_length).sum()) for examples, which in files)
        self.dropped = sum(len(examples.ends[which]) for examples, which in files) - len(self.start)
        self.begins = [0]  # the first sample of each epoch, as far as known
        self.planned: tuple[int, Numbers, Numbers] = (-1, np.empty(0, np.int64), np.empty(0, np.int64))

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        while self.begins[-1] <= index:
            _, bounds = self._plan(len(self.begins) - 1)
            self.begins.append(self.begins[-1] + len(bounds) - 1)
        epoch = bisect_right(self.begins, index) - 1
        order, bounds = self._plan(epoch)
        within = index - self.begins[epoch]
        return self._sample(order[bounds[within] : bounds[within + 1]].tolist())

    def _plan(self, epoch: int) -> tuple[Numbers, Numbers]:
        """Return the examples of an epoch in its order, and the bounds of the samples within that order."""
        if self.planned[0] != epoch:
            groups = np.random.default_rng((*self.seed, epoch)).permutation(len(self.start) // self.together)
            order = (groups[:, None] * self.together + np.arange(self.together)).reshape(-1)
            bounds = _packs(self.length[order], self.seq_length) if self.packed else np.arange(len(order) + 1)
            self.planned = (epoch, order, bounds)
        return self.planned[1:]

    def _sample(self, members: Sequence[int]) -> dict[str, Tensor]:
        size = self.seq_length
        tokens, labels = np.full(size, self.padding, np.int64), np.zeros(size, np.int64)
        mask, positions, segments = np.zeros(size, np.float32), np.zeros(size, np.int64), np.zeros(size, np.int64)
        at = 0
        for segment, member in enumerate(members, start=1):
            start, length = self.start[member], self.length[member]
            coded = self.tokens[self.file[member]][start : start + length + 1]
            ids = np.where(coded < 0, ~coded, coded)
            here = slice(at, at + length)
            tokens[here], labels[here], mask[here] = ids[:-1], ids[1:], coded[1:] >= 0
            positions[here], segments[here] = np.arange(length), segment
            at += int(length)
        positions[at:] = np.arange(size - at) if self.packed else np.arange(at, size)
        sample = {"tokens": tokens, "labels": labels, "loss_mask": mask, "position_ids": positions}
        if self.packed:
            sample["segment_ids"] = segments
        return {name: torch.from_numpy(values) for name, values in sample.items()}


def _places(examples: Examples, which: slice, seq_length: int, together: int) -> tuple[Numbers, Numbers]:
    """Return the starts of examples, and their lengths in places of a sample, without examples that have nothing to
    learn and those that belong together with them.
    """
    lengths = examples.lengths()[which]
    starts = examples.ends[which] - lengths
    learns = np.ones(len(starts), bool)
    for number in np.flatnonzero(lengths - 1 > seq_length):
        begin = starts[number]
        learns[number] = np.any(examples.tokens[begin + 1 : begin + seq_length + 1] >= 0)
    learns = learns.reshape(-1, together).all(1).repeat(together)
    return starts[learns], np.minimum(lengths - 1, seq_length)[learns]


def _packs(lengths: Numbers, seq_length: int) -> Numbers:
    """Return the bounds of samples among examples that fill them one after the other."""
    ends = np.concatenate([[0], np.cumsum(lengths)])
    following = (np.searchsorted(ends, ends[:-1] + seq_length, side="right") - 1).tolist()
    bounds = [0]
    while bounds[-1] < len(lengths):
        bounds.append(following[bounds[-1]])
    return np.array(bounds)


class Blended(Dataset[dict[str, Tensor]]):
    """Samples of several data sets, each drawn by its weight, in the order in which Megatron Core blends.

    `together` samples of one data set follow each other.
    """

    def __init__(self, datasets: Sequence[Sft], weights: Sequence[float], num_samples: int, together: int = 1) -> None:
        from megatron.core.datasets.helpers import build_blending_indices

        self.datasets, self.together = datasets, together
        num_samples = -(-num_samples // together)
        self.which, self.sample = np.zeros(num_samples, np.int16), np.zeros(num_samples, np.int64)
        shares = [weight / sum(weights) for weight in weights]
        build_blending_indices(self.which, self.sample, shares, len(datasets), num_samples, False)

    def __len__(self) -> int:
        return len(self.which) * self.together

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        group, member = divmod(index, self.together)
        return self.datasets[int(self.which[group])][int(self.sample[group]) * self.together + member]


def sft_datasets(
    config: Config, tokenizer: Tokenizer | None, num_samples: tuple[int, int, int], together: int = 1
) -> tuple[list[Sft | Blended | None], tuple[str, ...]]:
    """Return the data sets to train, validate and test with, and notes to the user. Call it on every rank.

    A data set is None if no samples are requested, or no files are named. Tokens are cached in `data.cache_dir`:
    rank 0 makes them, the others read them.

    Args:
        together: number of consecutive examples that belong together: each split has all of them or none.

    Raises:
        DataError: there is no tokenizer, files are missing or have another content, or nothing is to be learned.
    """
    if tokenizer is None:
        raise DataError(
            "`data.kind` = `sft` needs a tokenizer",
            hint="name it (`data.tokenizer`), or start from a checkpoint that brings one (`checkpoint.init`)",
        )
    import_megatron()
    data = config.data
    cache = data.cache_dir or config.run_dir / "cache"
    named = blends_of(data)
    blends = (named,) * 3 if isinstance(named, Blend) else named
    bounds = bounds_of(data.split) if isinstance(named, Blend) else [(0.0, 1.0)] * 3
    asked = [blend if count else None for blend, count in zip(blends, num_samples, strict=True)]
    paths = dict.fromkeys(path for blend in asked if blend for path in blend.paths)
    files = rank_0_first(lambda: {path: examples_of(path, tokenizer, cache) for path in paths})
    if together > 1:
        _check_together(files.values(), together)
    notes = [note for examples in files.values() for note in _notes_of(examples)]
    datasets: list[Sft | Blended | None] = [None] * 3
    for split, (blend, count) in enumerate(zip(asked, num_samples, strict=True)):
        if blend is None:
            continue
        sources = [files[path] for path in blend.paths]
        if check_split(split, blend, [examples.lengths() for examples in sources], bounds[split], notes):
            parts = [(each, _whole(slice_of(bounds[split], len(each.ends)), together)) for each in sources]
            datasets[split] = _dataset(config, tokenizer, blend, parts, split, count, notes, together)
    return datasets, tuple(notes)


def _dataset(
    config: Config,
    tokenizer: Tokenizer,
    blend: Blend,
    parts: Sequence[tuple[Examples, slice]],
    split: int,
    num_samples: int,
    notes: list[str],
    together: int,
) -> Sft | Blended:
    """Return one data set of all files, or one per file if they have weights."""
    sets = [parts] if blend.weights is None else [[part] for part in parts]
    datasets = [
        Sft(
            each,
            seq_length=config.training.seq_length,
            packed=config.data.packed,
            padding=tokenizer.eod or 0,
            seed=(config.training.seed, split, number),
            num_samples=num_samples,
            together=together,
        )
        for number, each in enumerate(sets)
    ]
    cut, dropped = sum(each.cut for each in datasets), sum(each.dropped for each in datasets)
    if not all(len(each.start) for each in datasets):
        raise DataError(
            f"no example to {NAMES[split]} with has anything to learn within `training.seq_length` = "
            f"{config.training.seq_length} tokens",
            hint="raise `training.seq_length`",
        )
    if cut:
        left_out = f", {dropped} of them left out: nothing to learn is left" if dropped else ""
        notes.append(
            f"{counted(cut, 'example', 'examples')} to {NAMES[split]} with {'is' if cut == 1 else 'are'} longer than "
            f"`training.seq_length` = {config.training.seq_length} and cut{left_out}"
        )
    return datasets[0] if blend.weights is None else Blended(datasets, blend.weights, num_samples, together)


def _whole(which: slice, together: int) -> slice:
    """Return a slice without the groups that begin or end outside of it."""
    return slice(-(-(which.start or 0) // together) * together, which.stop // together * together)


def _check_together(files: Iterable[Examples], together: int) -> None:
    """Refuse files with incomplete groups of examples: a missing example would shift all later ones.

    Raises:
        DataError: names all of these files.
    """
    problems = []
    for each in files:
        if each.empty:
            problems.append(f"`{each.path}`: {counted(each.empty, 'example has', 'examples have')} nothing to learn")
        elif each.records % together:
            problems.append(
                f"`{each.path}` has {counted(each.records, 'example', 'examples')}, no multiple of {together}"
            )
    if problems:
        raise DataError(f"{together} examples, one after the other, belong together", items=problems)


def _notes_of(examples: Examples) -> list[str]:
    if not examples.empty:
        return []
    return [
        f"`{examples.path}`: {examples.empty} of {counted(examples.records, 'example', 'examples')} have nothing to "
        "learn and are left out"
    ]
