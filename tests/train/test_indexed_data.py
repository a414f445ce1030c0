"""Indexed data: samples, blends and splits are those of Megatron Core, and what is refused."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from fixtures.tokenizer import make_tokenizer, stories
from mcore_convert.errors import ConvertError, DataError
from mcore_convert.megatron.cpu import import_megatron
from tests.ranks import run_ranks
from tests.train.conftest import LENGTH, SEED
from tests.train.test_data_sets import config_of, equal, provided
from tests.train.test_fine_tuning_data import PROMPTS, jsonl
from train_entry.config.schema import Config
from train_entry.data.tokenizer import Tokenizer, load_tokenizer

# Indexed data


def by_megatron(config: Config, tokenizer: Tokenizer, samples: list[int], cache: Path, **values: Any) -> list[Any]:
    """Return what Megatron Core's own builder makes."""
    import_megatron()
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    settings = GPTDatasetConfig(
        random_seed=SEED,
        sequence_length=LENGTH,
        tokenizer=tokenizer,
        path_to_cache=str(cache),
        reset_position_ids=config.data.reset_position_ids,
        reset_attention_mask=False,
        eod_mask_loss=config.data.eod_mask_loss,
        **values,
    )
    built: list[Any] = BlendedMegatronDatasetBuilder(GPTDataset, samples, lambda: True, settings).build()
    return built


@pytest.mark.parametrize("options", [{}, {"eod_mask_loss": True, "reset_position_ids": True}])
def test_samples_are_those_of_megatron(
    options: dict[str, Any], tmp_path: Path, corpora: tuple[str, str], tokenizer: Tokenizer
) -> None:
    """Over several epochs, at the usual split."""
    config = config_of(tmp_path / "run", {"kind": "indexed", "paths": [corpora[0]], "split": "80, 15, 5", **options})
    data = provided(config, tokenizer, (400, 16, 8))
    expected = by_megatron(
        config, tokenizer, [400, 16, 8], tmp_path / "cache", blend=([corpora[0]], None), split="80,15,5"
    )
    for ours, theirs, count in zip((data.train, data.valid, data.test), expected, (400, 16, 8), strict=True):
        assert ours is not None
        assert len(ours) == len(theirs) >= count
        for number in range(count):
            assert equal(ours[number], theirs[number])
            assert set(ours[number]) == {"tokens", "labels", "loss_mask", "position_ids"}
    ends = sum(int((sample["labels"] == tokenizer.eod).sum()) for sample in map(expected[0].__getitem__, range(160)))
    assert data.train is not None
    learned = list(map(data.train.__getitem__, range(160)))
    messages = sum(int(((sample["labels"] == tokenizer.eod) & (sample["loss_mask"] > 0)).sum()) for sample in learned)
    assert messages == ends > 10  # the end of text is learned, although it is the tokenizer's padding too


def test_blends_follow_their_weights(tmp_path: Path, corpora: tuple[str, str], tokenizer: Tokenizer) -> None:
    """Without a process group, which Megatron Core asks for when it blends."""
    few, every = corpora[1], corpora[0]
    weighted = {"kind": "indexed", "paths": [every, few], "weights": [1.0, 3.0], "split": "1"}
    train = provided(config_of(tmp_path, weighted), tokenizer, (400, 0, 0)).train
    assert train is not None
    assert len(train) >= 400
    assert not torch.distributed.is_initialized()
    counts = Counter(int(train[number]["dataset_id"]) for number in range(400))
    assert counts == {0: 100, 1: 300}
    expected = _blended_by_megatron(tmp_path, corpora, tokenizer)
    assert all(equal(train[number], expected[number]) for number in range(400))
    by_size = provided(config_of(tmp_path, {**weighted, "weights": []}), tokenizer, (2000, 0, 0)).train
    assert by_size is not None
    assert len(by_size) >= 2000  # more than an epoch
    sizes = [Path(f"{path}.bin").stat().st_size for path in (every, few)]
    counts = Counter(int(by_size[number]["dataset_id"]) for number in range(2000))
    assert counts[0] == pytest.approx(2000 * sizes[0] / sum(sizes), abs=2)


def _blended_by_megatron(tmp_path: Path, corpora: tuple[str, str], tokenizer: Tokenizer) -> Any:
    from mcore_convert.megatron.parallel import single_process

    with single_process():
        return by_megatron(
            Config(), tokenizer, [400, 0, 0], tmp_path / "megatron", blend=([*corpora], [0.25, 0.75]), split="1"
        )[0]


def test_splits_with_files_of_their_own(tmp_path: Path, corpora: tuple[str, str], tokenizer: Tokenizer) -> None:
    every, few = corpora
    config = config_of(tmp_path, {"kind": "indexed", "train_paths": [every, few], "valid_paths": [few]})
    data = provided(config, tokenizer, (50, 10, 10))
    assert data.train is not None
    assert data.valid is not None
    assert data.test is None
    allowed, foreign = (
        {
            tuple(ids[at : at + 8])
            for text in texts
            for ids in [tokenizer.hf(text).input_ids]
            for at in range(len(ids) - 7)
        }
        for texts in (stories()[5:8], stories()[:5])
    )
    windows = {tuple(each) for number in range(10) for each in data.valid[number]["tokens"].unfold(0, 8, 1).tolist()}
    assert len(windows & allowed) > 150
    assert not windows & (foreign - allowed)


def test_data_train_without_a_tokenizer(tmp_path: Path, corpora: tuple[str, str], tokenizer: Tokenizer) -> None:
    """Those of Megatron-LM, without a sidecar, too; then only what ends a document is not known."""
    for suffix in (".bin", ".idx"):
        shutil.copy(f"{corpora[0]}{suffix}", tmp_path / f"bare{suffix}")
    masked = {"kind": "indexed", "eod_mask_loss": True, "split": "1"}
    with_sidecar = provided(config_of(tmp_path / "a", {**masked, "paths": [corpora[0]]}), None, (99, 0, 0)).train
    known = provided(config_of(tmp_path / "b", {**masked, "paths": [corpora[0]]}), tokenizer, (99, 0, 0)).train
    assert with_sidecar is not None
    assert known is not None
    assert all(equal(known[number], with_sidecar[number]) for number in range(99))
    bare = provided(config_of(tmp_path, {"kind": "indexed", "paths": [f"{tmp_path}/bare"]}), None, (20, 0, 0)).train
    assert bare is not None
    assert bare[0]["loss_mask"].sum() == LENGTH
    with pytest.raises(DataError, match="need to know which token ends a document"):
        provided(config_of(tmp_path, {**masked, "paths": [f"{tmp_path}/bare"]}), None, (20, 0, 0))


def test_indices_are_kept_and_torn_ones_made_again(
    tmp_path: Path, corpora: tuple[str, str], tokenizer: Tokenizer
) -> None:
    config = config_of(tmp_path, {"kind": "indexed", "paths": [corpora[0]]})
    train = provided(config, tokenizer, (50, 0, 0)).train
    assert train is not None
    samples = [train[number] for number in range(50)]
    kept = sorted((tmp_path / "cache").glob("*.npy"))
    assert len(kept) == 3
    before = [file.stat().st_mtime_ns for file in kept]
    provided(config, tokenizer, (50, 0, 0))
    assert [file.stat().st_mtime_ns for file in kept] == before
    torn = next(file for file in kept if "shuffle" in file.name)
    content = torn.read_bytes()
    for length in (len(content) - 8, 60, 0):
        torn.write_bytes(content[:length])
        again = provided(config, tokenizer, (50, 0, 0)).train
        assert again is not None
        assert all(equal(sample, again[number]) for number, sample in enumerate(samples))


def test_ranks_have_the_same_samples_and_refusals(
    tmp_path: Path, corpora: tuple[str, str], tokenizer: Tokenizer
) -> None:
    """A refusal that only rank 0 meets too: nobody waits for it."""

    def on_a_rank() -> tuple[list[list[int]], list[str]]:
        train = provided(
            config_of(tmp_path, {"kind": "indexed", "paths": list(corpora), "weights": [1, 1]}), tokenizer, (20, 0, 0)
        ).train
        sft = provided(
            config_of(tmp_path, {"kind": "sft", "paths": [str(file)], "split": "1"}), tokenizer, (8, 0, 0)
        ).train
        assert train is not None
        assert sft is not None
        samples = [train[number]["tokens"].tolist() for number in range(20)] + [sft[0]["tokens"].tolist()]
        refusals = []
        for data in (
            {"kind": "indexed", "paths": ["nowhere"]},
            {"kind": "sft", "paths": [f"{tmp_path}/{torch.distributed.get_rank()}.jsonl"]},
        ):
            with pytest.raises(ConvertError) as refused:
                provided(config_of(tmp_path, data), tokenizer, (20, 0, 0))
            refusals.append(refused.value.message)
        return samples, refusals

    file = jsonl(tmp_path / "examples.jsonl", PROMPTS)
    jsonl(tmp_path / "1.jsonl", PROMPTS)  # rank 1 alone has its file
    first, second = run_ranks(2, on_a_rank)
    assert first == second
    assert first[1] == ["the data `nowhere` are not there", f"`{tmp_path}/0.jsonl` does not exist"]


REFUSED: dict[str, tuple[dict[str, Any], tuple[int, int, int], str]] = {
    "no paths": ({}, (8, 0, 0), "needs `data.paths` or `data.train_paths`"),
    "both": ({"paths": ["FEW"], "valid_paths": ["FEW"]}, (8, 0, 0), "and so are paths for one split"),
    "weights": ({"paths": ["FEW"], "weights": [1, 2]}, (8, 0, 0), "2 values for 1 paths"),
    "split": ({"paths": ["FEW"], "split": "90;10"}, (8, 0, 0), "`90;10` is no split"),
    "zero": ({"paths": ["FEW"], "split": "0,0,0"}, (8, 0, 0), "`0,0,0` is no split"),
    "missing": ({"paths": ["GONE"]}, (8, 0, 0), "GONE.idx is missing"),
    "no train": ({"paths": ["FEW"], "split": "0,1"}, (8, 0, 0), "no documents are left to train with"),
    "no valid": (
        {"paths": ["ALL", "FEW"]},
        (8, 8, 0),
        "no documents are left to validate with\n  `FEW` has 3 documents",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_indexed_data_that_are_refused(
    case: str, tmp_path: Path, corpora: tuple[str, str], tokenizer: Tokenizer
) -> None:
    """A split without documents among them, over which Megatron Core would never come to an end."""
    data, samples, message = REFUSED[case]
    places = {"ALL": corpora[0], "FEW": corpora[1], "GONE": f"{tmp_path}/GONE"}
    given = {
        name: [places.get(each, each) for each in value] if "paths" in name else value for name, value in data.items()
    }
    with pytest.raises(DataError) as refused:
        provided(config_of(tmp_path, {"kind": "indexed", **given}), tokenizer, samples)
    text = str(refused.value).replace(corpora[1], "FEW")
    assert message in text


def test_a_test_split_without_documents_is_reported(
    tmp_path: Path, corpora: tuple[str, str], tokenizer: Tokenizer
) -> None:
    """As a small file has none by the usual split."""
    data = provided(config_of(tmp_path, {"kind": "indexed", "paths": [corpora[0]]}), tokenizer, (8, 8, 8))
    assert data.valid is not None
    assert data.test is None
    assert data.notes == (f"no documents are left to test with: `{corpora[0]}` has 24 documents",)


def test_data_of_another_tokenizer_are_refused(tmp_path: Path, corpora: tuple[str, str], folder: Path) -> None:
    config = config_of(tmp_path, {"kind": "indexed", "paths": [corpora[0]]})
    other = load_tokenizer(str(make_tokenizer(tmp_path / "other", 380)))
    with pytest.raises(
        DataError, match=r"was made with another tokenizer \(`.*tiny`\) than that of the run \(`.*other`\)"
    ):
        provided(config, other, (8, 0, 0))
    with pytest.raises(DataError, match=r"a tokenizer of 400 tokens .* vocabulary is 390"):
        provided(config, None, (8, 0, 0), vocab_size=390)
    with pytest.raises(DataError, match="has 400 tokens, the model's vocabulary 399"):
        provided(config, load_tokenizer(str(folder)), (8, 0, 0), vocab_size=399)
    for suffix in (".bin", ".idx"):
        shutil.copy(f"{corpora[0]}{suffix}", tmp_path / f"bare{suffix}")
    with pytest.raises(DataError, match=r"has the token 39\d, the model a vocabulary of 390"):
        provided(
            config_of(tmp_path, {"kind": "indexed", "paths": [f"{tmp_path}/bare"]}), None, (8, 0, 0), vocab_size=390
        )
    added = load_tokenizer(str(folder)).hf
    added.add_special_tokens({"pad_token": "<|pad|>"})  # behind the others: the ids of texts are as before
    added.save_pretrained(tmp_path / "added")
    assert provided(config, load_tokenizer(str(tmp_path / "added")), (8, 0, 0), vocab_size=401).train is not None
