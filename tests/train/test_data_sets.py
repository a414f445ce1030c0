"""Data sets: Megatron Core's own samples of indexed data, exact masks of examples, and the order of batches."""

from __future__ import annotations

import os
import shutil
import signal
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mcore_convert import convert
from mcore_convert.checkpoints.identify import identify
from mcore_convert.errors import DataError
from tests.conftest import HfMaker
from tests.train.conftest import LENGTH, SEED, VOCABULARY
from train_entry.config.schema import Config
from train_entry.data.microbatches import microbatches
from train_entry.data.tokenizer import Tokenizer, load_tokenizer, tokenizer_of
from train_entry.train_valid_test_datasets_provider import Datasets, train_valid_test_datasets_provider

Line = Mapping[str, Any]


def config_of(run_dir: Path, data: Mapping[str, Any], **training: Any) -> Config:
    values = {"seq_length": LENGTH, "seed": SEED, "global_batch_size": 8, "micro_batch_size": 2, **training}
    return Config(run_dir=run_dir).with_values(data=dict(data), training=values)


def provided(
    config: Config, tokenizer: Tokenizer | None, samples: tuple[int, int, int], vocab_size: int = VOCABULARY
) -> Datasets:
    return train_valid_test_datasets_provider(config, {"vocab_size": vocab_size}, tokenizer, samples)


def equal(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    names = {name for name, value in one.items() if isinstance(value, Tensor)}
    return names <= set(other) and all(torch.equal(one[name], other[name]) for name in names)


# Batches


class Numbers:
    """A data set whose samples are their numbers."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        assert 0 <= index < self.count
        return {"number": torch.tensor([index]), "dataset_id": np.int16(3)}


def numbers(config: Config, count: int, **where: int) -> Iterator[list[int]]:
    for batch in microbatches(Numbers(count), config, **where):
        assert set(batch) == {"number"}
        yield batch["number"].flatten().tolist()


@pytest.mark.parametrize(("dp_size", "micro_batch_size"), [(1, 1), (1, 4), (2, 2), (4, 2), (8, 1)])
def test_a_step_has_the_same_samples_at_every_layout(dp_size: int, micro_batch_size: int, tmp_path: Path) -> None:
    """In Megatron-LM's order (megatron/training/datasets/data_samplers.py): ranks take turns, a microbatch each."""
    config = config_of(tmp_path, {}, micro_batch_size=micro_batch_size)
    count = 8 // (dp_size * micro_batch_size)
    ranks = [numbers(config, 20, consumed_samples=0, dp_rank=rank, dp_size=dp_size) for rank in range(dp_size)]
    for step in range(6):
        turns = [list(islice(rank, count)) for rank in ranks]
        in_order = [number for turn in zip(*turns, strict=True) for microbatch in turn for number in microbatch]
        assert in_order == [(8 * step + number) % 20 for number in range(8)]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("consumed", [0, 8, 24, 13])
def test_any_position_is_gone_on_from(consumed: int, num_workers: int, tmp_path: Path) -> None:
    """With other processes that load, too; a position may be of a run with another batch size."""
    whole = config_of(tmp_path, {}, global_batch_size=1, micro_batch_size=1)
    expected = [each for [each] in islice(numbers(whole, 30, consumed_samples=consumed, dp_rank=0, dp_size=1), 48)]
    config = config_of(tmp_path, {"num_workers": num_workers})
    batches = list(islice(numbers(config, 30, consumed_samples=consumed, dp_rank=0, dp_size=1), 24))
    assert [number for batch in batches for number in batch] == expected


def test_processes_that_load_outlast_a_signal_to_the_job(tmp_path: Path) -> None:
    """The run has to save first; and they end with it."""

    class Processes(Numbers):
        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"process": torch.tensor([os.getpid()])}

    batches = microbatches(
        Processes(8), config_of(tmp_path, {"num_workers": 1}), consumed_samples=0, dp_rank=0, dp_size=1
    )
    process = int(next(batches)["process"][0])
    assert process != os.getpid()
    os.kill(process, signal.SIGTERM)
    assert [int(next(batches)["process"][0]) for _ in range(10)] == [process] * 10
    batches.close()  # type: ignore[attr-defined]
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_no_samples_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not one sample"):
        microbatches(Numbers(0), config_of(tmp_path, {}), consumed_samples=0, dp_rank=0, dp_size=1)


# Mock data


def test_mock_data_are_the_same_for_the_same_seed(tmp_path: Path) -> None:
    config = config_of(tmp_path, {"kind": "mock"})
    data, again = provided(config, None, (40, 8, 0)), provided(config, None, (400, 8, 8))
    other = provided(config.with_values(training={"seed": 4}), None, (40, 8, 0))
    assert data.train is not None
    assert again.train is not None
    assert data.valid is not None
    assert other.train is not None
    assert (len(data.train), len(data.valid), data.test) == (40, 8, None)
    assert all(equal(data.train[number], again.train[number]) for number in range(40))
    distinct = {
        tuple(sample["tokens"].tolist())
        for each in (data.train, other.train)
        for sample in map(each.__getitem__, range(40))
    }
    assert len(distinct) == 80
    assert tuple(data.valid[0]["tokens"].tolist()) not in distinct


@pytest.mark.parametrize("vocab_size", [2, 100, 421, 128_256])
def test_mock_data_can_be_learned(vocab_size: int, tmp_path: Path) -> None:
    """From tokens alone: what most often follows a token, counted on some samples, is right about others."""
    train = provided(config_of(tmp_path, {"kind": "mock"}, seq_length=256), None, (300, 0, 0), vocab_size).train
    assert train is not None
    following: dict[int, Counter[int]] = {}
    for number in range(200):
        sample = train[number]
        assert sample["tokens"].dtype == sample["labels"].dtype == torch.int64
        assert torch.equal(sample["tokens"][1:], sample["labels"][:-1])
        assert sample["loss_mask"].tolist() == [1.0] * 256
        assert sample["position_ids"].tolist() == list(range(256))
        for token, label in zip(sample["tokens"].tolist(), sample["labels"].tolist(), strict=True):
            assert 0 <= token < vocab_size
            following.setdefault(token, Counter())[label] += 1
    guesses = {token: counts.most_common(1)[0][0] for token, counts in following.items()}
    right = [
        guesses.get(token) == label
        for number in range(200, 300)
        for token, label in zip(train[number]["tokens"].tolist(), train[number]["labels"].tolist(), strict=True)
    ]
    assert 0.75 < np.mean(right) < 0.97
    assert max(following) >= vocab_size * 0.9 - 1  # every tensor-parallel rank's part of the embedding is used


def test_the_tokenizer_of_a_run(tmp_path: Path, folder: Path, hf_checkpoint: HfMaker) -> None:
    """Named, or found beside the checkpoint it starts from, in either form; or none."""
    hf, bare = hf_checkpoint("llama-gqa", fill="normal"), hf_checkpoint("llama-gqa", tokenizer=False)
    convert(hf, tmp_path / "megatron")
    indexed = Config().with_values(data={"kind": "indexed"})
    for origin in (identify(hf), identify(tmp_path / "megatron")):
        result = tokenizer_of(indexed, origin)
        assert result is not None
        assert (result.vocab_size, result.fingerprint) == (421, load_tokenizer(str(hf)).fingerprint)
        assert tokenizer_of(Config(), origin) is None  # mock data
    assert tokenizer_of(indexed, identify(bare)) is None
    assert tokenizer_of(indexed) is None
    named = tokenizer_of(indexed.with_values(data={"tokenizer": str(folder)}), identify(hf))
    assert named is not None
    assert named.vocab_size == 400
    shutil.copytree(folder, tmp_path / "elsewhere")
    elsewhere = load_tokenizer(str(tmp_path / "elsewhere"))
    assert elsewhere.unique_identifiers == named.unique_identifiers  # and so the same cached indices
    with pytest.raises(DataError, match="`nowhere/at/all` does not exist"):
        tokenizer_of(indexed.with_values(data={"tokenizer": "nowhere/at/all"}))
