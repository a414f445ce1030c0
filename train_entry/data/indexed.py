"""Indexed data: Megatron Core's `GPTDataset` over `.bin`/`.idx` pairs, in the samples and the order of Megatron-LM."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.distributed as dist

from mcore_convert.errors import DataError
from mcore_convert.megatron.cpu import import_megatron
from mcore_convert.megatron.parallel import single_process
from train_entry.data.bin_idx import Pair, check_tokens, open_pair
from train_entry.data.ranks import rank_0_first
from train_entry.data.sidecar import Sidecar, sidecar_of
from train_entry.data.splits import Blend, blends_of, bounds_of, check_split
from train_entry.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from train_entry.config.schema import Config, Data

THREADS = 4  # for building the indices of the files of a blend


@dataclass(frozen=True)
class Vocabulary:
    """Stand-in for the tokenizer of Megatron's data sets, if a run has none."""

    vocab_size: int
    eod: int | None

    @property
    def unique_identifiers(self) -> dict[str, Any]:
        """Fields for the names of cached indices."""
        return {"vocab_size": self.vocab_size, "eod": self.eod}


def indexed_datasets(
    config: Config, vocab_size: int, tokenizer: Tokenizer | None, num_samples: tuple[int, int, int]
) -> tuple[list[Any], tuple[str, ...]]:
    """Return the data sets to train, validate and test with, and notes to the user. Call it on every rank.

    A data set is None if no samples are requested, or no files are named. Indices of shuffled samples are cached in
    `data.cache_dir`: rank 0 builds them, the others read them.

    Raises:
        DataError: files are missing, damaged, too small, or made with another tokenizer; on every rank.
    """
    import_megatron()
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset

    inputs = rank_0_first(lambda: _checked(config, vocab_size, tokenizer, num_samples))
    settings = _settings(config, inputs, tokenizer or _vocabulary(config, vocab_size, inputs))
    with contextlib.nullcontext() if dist.is_initialized() else single_process():  # a blend asks for the rank
        if dist.get_rank() == 0:
            _clear_torn(Path(settings.path_to_cache))
        try:
            built = BlendedMegatronDatasetBuilder(GPTDataset, list(num_samples), lambda: True, settings).build()
        except FileNotFoundError as error:
            raise DataError(
                f"rank {dist.get_rank()} does not find what rank 0 has written: `{error.filename}`",
                hint="`data.cache_dir` (by default in the run directory) must be on storage that all nodes share",
            ) from error
    return [each if blend else None for each, blend in zip(built, inputs.blends, strict=True)], inputs.notes


@dataclass(frozen=True)
class Inputs:
    """Files of a run: those of each split that it uses, opened, with the tokenizers they were made with."""

    blends: tuple[Blend | None, ...]
    shared: Blend | None
    pairs: dict[str, Pair]
    sidecars: tuple[Sidecar | None, ...]
    notes: tuple[str, ...]


def _checked(config: Config, vocab_size: int, tokenizer: Tokenizer | None, num_samples: Sequence[int]) -> Inputs:
    """Return the files of the splits that samples are requested from, each proven fit for the run."""
    named = blends_of(config.data)
    shared = named if isinstance(named, Blend) else None
    bounds = bounds_of(config.data.split) if shared else [(0.0, 1.0)] * 3
    pairs: dict[str, Pair] = {}
    sidecars: list[Sidecar | None] = []
    blends: list[Blend | None] = [None] * 3
    notes: list[str] = []
    for split, count in enumerate(num_samples):
        blend = named if isinstance(named, Blend) else named[split]
        if blend is None or not count:
            continue
        for path in blend.paths:
            if path not in pairs:
                pairs[path] = open_pair(path)
                sidecars.append(sidecar_of(path))
                _check_tokenizer(path, sidecars[-1], tokenizer, vocab_size)
                check_tokens(pairs[path], vocab_size)
        if check_split(split, blend, [pairs[path].lengths() for path in blend.paths], bounds[split], notes):
            blends[split] = blend
    return Inputs(tuple(blends), shared, pairs, tuple(sidecars), tuple(notes))


def vocab_size_of(data: Data) -> int | None:
    """Return the vocabulary size of the tokenizer that made the data; None if they do not record it.

    Raises:
        DataError: a sidecar is not one that `mcore-convert data prepare` writes.
    """
    sidecars = map(sidecar_of, (*data.paths, *data.train_paths, *data.valid_paths, *data.test_paths))
    return max((sidecar.vocab_size for sidecar in sidecars if sidecar), default=None)


def _check_tokenizer(prefix: str, sidecar: Sidecar | None, tokenizer: Tokenizer | None, vocab_size: int) -> None:
    if sidecar is None:
        return
    if tokenizer is not None and sidecar.fingerprint != tokenizer.fingerprint:
        raise DataError(
            f"`{prefix}` was made with another tokenizer (`{sidecar.tokenizer}`) than that of the run "
            f"(`{tokenizer.name}`)",
            hint=f"prepare the data with `{tokenizer.name}`; or, if the ids mean the same, remove `{prefix}.json`",
        )
    if sidecar.vocab_size > vocab_size:
        raise DataError(
            f"`{prefix}` was made with a tokenizer of {sidecar.vocab_size} tokens (`{sidecar.tokenizer}`), the model's "
            f"vocabulary is {vocab_size}",
            hint="prepare the data with the model's own tokenizer",
        )


def _vocabulary(config: Config, vocab_size: int, inputs: Inputs) -> Vocabulary:
    """Return the vocabulary without a tokenizer. Megatron-LM's data do not record the token that ends a document."""
    ends = {sidecar.eod if sidecar else None for sidecar in inputs.sidecars}
    eod = ends.pop() if len(ends) == 1 else None
    if eod is None and (config.data.eod_mask_loss or config.data.reset_position_ids):
        raise DataError(
            "`data.eod_mask_loss` and `data.reset_position_ids` need to know which token ends a document",
            hint="name the tokenizer of the data: `data.tokenizer`",
        )
    return Vocabulary(vocab_size, eod)


def _settings(config: Config, inputs: Inputs, facts: Tokenizer | Vocabulary) -> Any:
    """Return Megatron Core's `GPTDatasetConfig`."""
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

    data = config.data
    settings = GPTDatasetConfig(
        random_seed=config.training.seed,
        sequence_length=config.training.seq_length,
        blend=_as_megatron(inputs.shared, inputs) if inputs.shared else None,
        blend_per_split=None if inputs.shared else [_as_megatron(blend, inputs) for blend in inputs.blends],
        split=data.split if inputs.shared else None,
        path_to_cache=str(data.cache_dir or config.run_dir / "cache"),
        num_dataset_builder_threads=min(THREADS, len(inputs.pairs)),
        tokenizer=facts,
        reset_position_ids=data.reset_position_ids,
        reset_attention_mask=False,
        eod_mask_loss=data.eod_mask_loss,
        create_attention_mask=False,  # attention is causal anyway
    )
    if inputs.shared:  # builds only requested splits: building one without documents would never end
        matrix = settings.split_matrix
        settings.split_matrix = [each if blend else None for each, blend in zip(matrix, inputs.blends, strict=True)]
    return settings


def _as_megatron(blend: Blend | None, inputs: Inputs) -> tuple[list[str], list[float] | None] | None:
    """Return prefixes and weights. Weights by size count tokens, so that a blend lasts for any number of epochs."""
    if blend is None:
        return None
    if len(blend.paths) == 1:
        return [*blend.paths], None
    return [*blend.paths], list(blend.weights or (float(inputs.pairs[path].tokens) for path in blend.paths))


def _clear_torn(cache: Path) -> None:
    """Remove indices that a killed run has left half written: Megatron Core would take them as complete."""
    for file in cache.glob("*.npy"):
        try:
            np.load(file, mmap_mode="r")
        except (ValueError, EOFError):
            file.unlink(missing_ok=True)
