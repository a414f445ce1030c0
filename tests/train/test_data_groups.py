"""Rows that belong together stay together: in microbatches, on data-parallel ranks, and in the order of examples."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest
import torch

from fixtures.tokenizer import make_tokenizer
from mcore_convert.errors import DataError
from tests.train.test_data_sets import Numbers
from train_entry.config.schema import Config
from train_entry.data.microbatches import deal, microbatches
from train_entry.data.tokenizer import Tokenizer, load_tokenizer
from train_entry.train_valid_test_datasets_provider import train_valid_test_datasets_provider

TRAINING = {"seq_length": 16, "global_batch_size": 12, "micro_batch_size": 3}


@pytest.mark.parametrize("dp_size", [1, 2, 4])
@pytest.mark.parametrize("consumed", [0, 12, 7])
def test_groups_are_dealt_whole(dp_size: int, consumed: int) -> None:
    """Also where the data set begins anew, whose last group is not whole, and from a position within one."""
    config = Config().with_values(training=TRAINING)
    for rank in range(dp_size):
        batches = microbatches(
            Numbers(20), config, consumed_samples=consumed, dp_rank=rank, dp_size=dp_size, rows_per_sample=3
        )
        for batch in islice(batches, 20):
            first, *others = batch["number"].flatten().tolist()
            assert first % 3 == 0
            assert others == [first + 1, first + 2]
            assert first < 18


def test_a_batch_at_hand_is_dealt_as_one_that_is_read() -> None:
    config = Config().with_values(training=TRAINING)
    whole = {"number": torch.arange(12)[:, None]}
    for rank in range(2):
        read = islice(microbatches(Numbers(12), config, consumed_samples=0, dp_rank=rank, dp_size=2), 2)
        dealt = deal(whole, 12, 3, dp_rank=rank, dp_size=2)
        assert [each["number"].tolist() for each in dealt] == [each["number"].tolist() for each in read]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder, 300)
    return load_tokenizer(str(folder))


def config_of(folder: Path, sizes: dict[str, int], weights: tuple[float, ...] = ()) -> Config:
    """Return a run over files of so many examples each, whose prompts say which they are;
    number 5 of `a` is too long.
    """
    for name, size in sizes.items():
        lines = [
            {"prompt": f"{name}{n}" + " x" * 30 * (n == 5 and name == "a"), "completion": "y"} for n in range(size)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    paths = tuple(str(folder / f"{name}.jsonl") for name in sizes)
    data = {"kind": "sft", "paths": paths, "packed": False, "split": "7,3", "weights": weights}
    return Config(run_dir=folder / "run").with_values(data=data, training=TRAINING)


@pytest.mark.parametrize("weights", [(), (0.7, 0.3)])
def test_examples_keep_their_groups(weights: tuple[float, ...], tokenizer: Tokenizer, tmp_path: Path) -> None:
    """In each epoch, with and without a blend; a group with an example that has nothing to learn is left out whole."""
    config = config_of(tmp_path, {"a": 20, "b": 10}, weights)
    data = train_valid_test_datasets_provider(config, {"vocab_size": 300}, tokenizer, (60, 4, 0), rows_per_sample=2)
    seen = {}
    for name, samples in {"train": data.train, "valid": data.valid}.items():
        assert samples is not None
        texts = []
        for index in range(len(samples)):
            sample = samples[index]
            words = tokenizer.hf.decode(sample["tokens"][: int(sample["loss_mask"].nonzero()[0]) + 1])
            texts.append(words)
        firsts, seconds = texts[0::2], texts[1::2]
        for first, second in zip(firsts, seconds, strict=True):
            assert (first[0], int(first[1:]) % 2, int(second[1:])) == (second[0], 0, int(first[1:]) + 1)
        seen[name] = set(texts)
    assert not seen["train"] & seen["valid"]
    assert not {"a4", "a5"} & seen["train"]
    assert seen["train"] == {f"a{n}" for n in range(14) if n not in (4, 5)} | {f"b{n}" for n in range(6)}


def test_examples_that_do_not_stand_in_groups_are_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    config = config_of(tmp_path, {"a": 20, "b": 9})
    with pytest.raises(DataError) as refused:
        train_valid_test_datasets_provider(config, {"vocab_size": 300}, tokenizer, (8, 0, 0), rows_per_sample=2)
    assert "belong together" in str(refused.value)
    assert f"`{tmp_path}/b.jsonl` has 9 examples, no multiple of 2" in str(refused.value)
