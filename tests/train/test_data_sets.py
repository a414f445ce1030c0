"""Data sets: Megatron Core's own samples of indexed data, exact masks of examples, and the order of batches."""

from __future__ import annotations

import json
import os
import pickle
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

from fixtures.tokenizer import CHAT_TEMPLATE, END, make_tokenizer, stories
from mcore_convert import convert
from mcore_convert.checkpoints.identify import identify
from mcore_convert.errors import ConvertError, DataError
from mcore_convert.megatron.cpu import import_megatron
from tests.conftest import HfMaker
from tests.ranks import run_ranks
from train_entry.config.schema import Config
from train_entry.data.microbatches import Samples, microbatches
from train_entry.data.prepare import prepare
from train_entry.data.sft import Sft
from train_entry.data.sft_tokens import examples_of
from train_entry.data.tokenizer import Tokenizer, load_tokenizer, tokenizer_of
from train_entry.train_valid_test_datasets_provider import Datasets, train_valid_test_datasets_provider

VOCABULARY, LENGTH, SEED = 400, 32, 1234
Line = Mapping[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tiny", VOCABULARY)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(str(folder))


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> tuple[str, str]:
    """Two pairs: all stories, and three of them."""
    path = tmp_path_factory.mktemp("corpora")
    made: list[str] = []
    for name, texts in {"all": stories(), "few": stories()[5:8]}.items():
        (path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        made += prepare([f"{path}/{name}.jsonl"], f"{path}/{name}", tokenizer=str(folder), workers=1).pairs
    return made[0], made[1]


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


# Indexed data


def by_megatron(config: Config, tokenizer: Tokenizer, samples: list[int], cache: Path, **values: Any) -> list[Any]:
    """What Megatron Core's own builder makes."""
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
    told = sum(int(((sample["labels"] == tokenizer.eod) & (sample["loss_mask"] > 0)).sum()) for sample in learned)
    assert told == ends > 10  # the end of text is learned, although it is the tokenizer's padding too


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
    said = str(refused.value).replace(corpora[1], "FEW")
    assert message in said


def test_a_test_split_without_documents_is_told(tmp_path: Path, corpora: tuple[str, str], tokenizer: Tokenizer) -> None:
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


def test_the_tokenizer_of_a_run(tmp_path: Path, folder: Path, hf_checkpoint: HfMaker) -> None:
    """Named, or found beside the checkpoint it starts from, in either form; or none."""
    hf, bare = hf_checkpoint("llama-gqa", fill="normal"), hf_checkpoint("llama-gqa", tokenizer=False)
    convert(hf, tmp_path / "megatron")
    indexed = Config().with_values(data={"kind": "indexed"})
    for origin in (identify(hf), identify(tmp_path / "megatron")):
        found = tokenizer_of(indexed, origin)
        assert found is not None
        assert (found.vocab_size, found.fingerprint) == (421, load_tokenizer(str(hf)).fingerprint)
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


# Fine-tuning

PROMPTS: list[Line] = [
    {
        "prompt": f"Question {number}:{' why' * (number % 6)}",
        "completion": f" Because{' so' * (number % 4)}.",
        "id": number,
    }
    for number in range(11)
]
CHATS: list[Line] = [
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello, you."}]},
    {
        "messages": [
            {"role": "system", "content": "Be kind. 🦆"},
            {"role": "user", "content": "One?"},
            {"role": "assistant", "content": "Two"},
            {"role": "user", "content": "Three?"},
            {"role": "assistant", "content": " Four\n"},
            {"role": "user", "content": "And then?"},
        ]
    },
]


def jsonl(path: Path, lines: list[Line]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def learned_of(tokenizer: Tokenizer, line: Line) -> list[tuple[int, bool]]:
    """The oracle: tokens of each part on its own, and whether they are learned. The parts are spelled out here."""
    if "prompt" in line:
        parts = [(line["prompt"], False), (line["completion"] + END, True)]
    else:
        parts = []
        for message in line["messages"]:
            by_assistant = message["role"] == "assistant"
            parts += [(f"<|{message['role']}|>", False), (f"{message['content']}{END}", by_assistant)]
    return [(each, learned) for text, learned in parts for each in tokenizer.hf(text).input_ids]


def kept(path: Path, tokenizer: Tokenizer, cache: Path) -> list[list[tuple[int, bool]]]:
    """The examples of a file as they were tokenized."""
    examples = examples_of(str(path), tokenizer, cache)
    starts = examples.ends - examples.lengths()
    found = [examples.tokens[start:end].tolist() for start, end in zip(starts, examples.ends, strict=True)]
    return [[(token, True) if token >= 0 else (~token, False) for token in each] for each in found]


def test_only_what_the_model_says_is_learned(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Token by token, prompts, chats, several turns, characters of several tokens."""
    lines = [*PROMPTS, *CHATS]
    assert kept(jsonl(tmp_path / "a.jsonl", lines), tokenizer, tmp_path) == [
        learned_of(tokenizer, each) for each in lines
    ]


def test_a_template_may_mark_what_is_learned(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """With `{% generation %}`; here it leaves the end of a turn out. transformers itself says which those are."""
    hf = load_tokenizer(tokenizer.name).hf
    hf.chat_template = CHAT_TEMPLATE.replace(
        "{{ message.content }}",
        "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}"
        "{% else %}{{ message.content }}{% endif %}",
    )
    hf.save_pretrained(tmp_path / "marked")
    marked = load_tokenizer(str(tmp_path / "marked"))
    found = kept(jsonl(tmp_path / "a.jsonl", CHATS), marked, tmp_path)
    for line, example in zip(CHATS, found, strict=True):
        told = hf.apply_chat_template(line["messages"], return_assistant_tokens_mask=True, return_dict=True)
        assert example == list(zip(told["input_ids"], map(bool, told["assistant_masks"]), strict=True))
        said = [message["content"] for message in line["messages"] if message["role"] == "assistant"]
        assert hf.decode([token for token, learned in example if learned]) == "".join(said)


@pytest.mark.parametrize("trim", [False, True])
def test_no_token_reaches_from_the_prompt_into_its_completion(trim: bool, tmp_path: Path, folder: Path) -> None:
    """Wherever a text is cut: the prompt's tokens are those that it has when the model is asked.

    Also by a tokenizer that tells of a token where its text begins without the blank before it, as Llama 3's does.
    """
    from tokenizers.processors import ByteLevel

    tokenizer = load_tokenizer(str(folder))
    tokenizer.hf.backend_tokenizer.post_processor = ByteLevel(trim_offsets=trim)
    text = 'Once upon a time,  "Meow!"  said\n\n the  naïve 🦆 bird .\n'
    lines: list[Line] = [{"prompt": text[:cut], "completion": text[cut:]} for cut in range(len(text) + 1)]
    file = jsonl(tmp_path / "a.jsonl", lines)
    for line, found in zip(lines, kept(file, tokenizer, tmp_path), strict=True):
        assert found == learned_of(tokenizer, line), line
        if line["completion"].strip():
            whole = tokenizer.hf(text + END).input_ids
            assert len(found) - len(whole) <= 4  # and apart from there, the text is tokenized as it always is


def test_a_tokenizer_that_puts_a_blank_before_each_text(tmp_path: Path) -> None:
    """As Llama 2's: tokenized on its own, a completion would begin with a blank that it has not; a BOS comes first."""
    from tokenizers import Tokenizer as Rust
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    rust = Rust(models.BPE(unk_token="<unk>"))
    rust.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    rust.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    rust.train_from_iterator(stories(), trainer)
    rust.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    hf = PreTrainedTokenizerFast(tokenizer_object=rust, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    hf.save_pretrained(tmp_path / "llama2")
    tokenizer = load_tokenizer(str(tmp_path / "llama2"))
    file = jsonl(tmp_path / "a.jsonl", [{"prompt": 'The bird "', "completion": 'sang" a song.'}])
    (found,) = kept(file, tokenizer, tmp_path)
    assert [token for token, _ in found] == [*hf('The bird "sang" a song.').input_ids, 2]
    assert hf.convert_ids_to_tokens([token for token, learned in found if learned])[0][0] != "▁"
    assert "".join(hf.convert_ids_to_tokens([token for token, learned in found if learned])) == 'sang"▁a▁song.</s>'


def sft(path: Path, tokenizer: Tokenizer, *, packed: bool, length: int = 48, num_samples: int = 40) -> Sft:
    examples = examples_of(str(path), tokenizer, path.parent)
    which = slice(0, len(examples.ends))
    return Sft([(examples, which)], seq_length=length, packed=packed, padding=0, seed=(1,), num_samples=num_samples)


def unpacked(sample: Mapping[str, Tensor]) -> list[list[tuple[int, bool]]]:
    """The examples in a sample, as `learned_of` writes them, but that the first token is learned by nobody."""
    segments = sample["segment_ids"].tolist() if "segment_ids" in sample else None
    tokens, labels, mask, positions = (
        sample[name].tolist() for name in ("tokens", "labels", "loss_mask", "position_ids")
    )
    found: list[list[tuple[int, bool]]] = []
    end = len(tokens)
    if segments is None:
        while mask[end - 1] == 0 and (tokens[end - 1], labels[end - 1]) == (0, 0):
            end -= 1
        segments = [1] * end + [0] * (len(tokens) - end)
    for number in range(1, max(segments) + 1):
        here = [at for at, segment in enumerate(segments) if segment == number]
        assert here == list(range(here[0], here[-1] + 1))
        assert [positions[at] for at in here] == list(range(len(here)))
        assert [labels[at] for at in here[:-1]] == [tokens[at] for at in here[1:]]
        found.append([(tokens[here[0]], False), *((labels[at], bool(mask[at])) for at in here)])
    rest = [at for at, segment in enumerate(segments) if segment == 0]
    assert all((tokens[at], mask[at]) == (0, 0.0) for at in rest)
    return found


@pytest.mark.parametrize("packed", [True, False])
def test_each_epoch_has_each_example_once(packed: bool, tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Whole, in another order each time, and the same whatever has been read before."""
    file = jsonl(tmp_path / "a.jsonl", PROMPTS)
    expected = [
        [(token, learned and number > 0) for number, (token, learned) in enumerate(learned_of(tokenizer, line))]
        for line in PROMPTS
    ]
    data = sft(file, tokenizer, packed=packed)
    samples = [data[number] for number in range(40)]
    assert all(sample["tokens"].shape == (48,) for sample in samples)
    examples = [example for sample in samples for example in unpacked(sample)]
    epochs = [examples[at : at + 11] for at in range(0, len(examples) - 10, 11)]
    assert len(epochs) >= 3
    for epoch in epochs:
        assert sorted(epoch) == sorted(expected)
    assert epochs[0] != epochs[1] != epochs[2]
    assert max(len(unpacked(sample)) for sample in samples) == (2 if packed else 1)
    again = pickle.loads(pickle.dumps(sft(file, tokenizer, packed=packed, num_samples=9)))
    for number in (33, 2, 17, 39):
        assert equal(samples[number], again[number])


def test_packs_are_as_full_as_their_order_allows(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """No example would have fitted into the sample before its own."""
    data = sft(jsonl(tmp_path / "a.jsonl", PROMPTS), tokenizer, packed=True)
    for before, after in zip(range(3), range(1, 4), strict=True):
        used = int((data[before]["segment_ids"] > 0).sum())
        assert used + int((data[after]["segment_ids"] == 1).sum()) > 48


def test_what_is_cut_and_left_out_is_told(tmp_path: Path, tokenizer: Tokenizer) -> None:
    lines = [*PROMPTS[:4], {"prompt": "Long", "completion": " so" * 99}, {"prompt": "why " * 99, "completion": "!"}]
    lines += [{"messages": [{"role": "user", "content": "Nobody answers"}]}] * 2
    file = jsonl(tmp_path / "a.jsonl", lines)
    config = config_of(tmp_path, {"kind": "sft", "paths": [str(file)], "split": "1"}, seq_length=48)
    for packed in (True, False):
        data = provided(config.with_values(data={"packed": packed}), tokenizer, (30, 0, 0))
        assert data.train is not None
        found = {tuple(example) for number in range(30) for example in unpacked(data.train[number])}
        assert len(found) == 5
        assert max(map(len, found)) == 49
        assert data.notes == (
            f"`{file}`: 2 of 8 examples have nothing to learn and are left out",
            "2 examples to train with are longer than `training.seq_length` = 48 and cut, 1 of them left out: "
            "nothing to learn is left",
        )
    with pytest.raises(DataError, match=r"no example to train with has anything to learn within .* = 2 tokens"):
        provided(config.with_values(training={"seq_length": 2}), tokenizer, (8, 0, 0))


def test_examples_are_split_and_blended(tmp_path: Path, tokenizer: Tokenizer) -> None:
    one, two = jsonl(tmp_path / "1.jsonl", PROMPTS[:10]), jsonl(tmp_path / "2.jsonl", CHATS * 5)
    both = {"kind": "sft", "paths": [str(one), str(two)], "split": "80,20,0", "packed": False}
    long = {"seq_length": 64}

    def texts(data: Samples | None, count: int) -> list[str]:
        assert data is not None
        return [tokenizer.hf.decode(data[number]["tokens"][:12]) for number in range(count)]

    data = provided(config_of(tmp_path, both, **long), tokenizer, (16, 4, 0))
    train, valid = texts(data.train, 16), texts(data.valid, 4)
    assert sum(text.startswith("Question") for text in train) == 8
    assert {text.split(":")[0] for text in valid if text.startswith("Question")} == {"Question 8", "Question 9"}
    weighted = provided(config_of(tmp_path, {**both, "weights": [3, 1]}, **long), tokenizer, (16, 0, 0))
    assert sum(text.startswith("Question") for text in texts(weighted.train, 16)) == 12


def test_tokens_are_kept_until_something_changes(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = jsonl(tmp_path / "a.jsonl", PROMPTS)
    first = kept(file, tokenizer, tmp_path / "cache")
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()}
    assert {path.suffix for path in files} == {".tokens", ".ends", ".json"}
    assert kept(file, tokenizer, tmp_path / "cache") == first
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()} == files
    jsonl(file, PROMPTS[1:])
    assert kept(file, tokenizer, tmp_path / "cache") == first[1:]
    jsonl(file, CHATS)
    template = load_tokenizer(tokenizer.name)
    assert kept(file, template, tmp_path / "cache") == [learned_of(tokenizer, line) for line in CHATS]
    template.hf.chat_template = CHAT_TEMPLATE.replace("message.content", "message.content | upper")
    assert kept(file, template, tmp_path / "cache") != [learned_of(tokenizer, line) for line in CHATS]


UNSTABLE = (  # it drops what the assistant has thought in other turns than the last
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if loop.last and message.role == 'assistant' %}thinking{% endif %}"
    "{{ message.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
BAD: dict[str, tuple[str, Line]] = {
    "neither `messages` nor `prompt` and `completion` among its keys (text)": (CHAT_TEMPLATE, {"text": "a"}),
    "`completion` is a NoneType, not text": (CHAT_TEMPLATE, {"prompt": "a", "completion": None}),
    "`messages` is no list of messages": (CHAT_TEMPLATE, {"messages": []}),
    "message 1 has no `role`": (CHAT_TEMPLATE, {"messages": ["hi"]}),
    "message 1 has the role `bot`": (CHAT_TEMPLATE, {"messages": [{"role": "bot", "content": "a"}]}),
    "message 1 has no `content`": (CHAT_TEMPLATE, {"messages": [{"role": "user"}]}),
    "the assistant has the first word": (CHAT_TEMPLATE, {"messages": [{"role": "assistant", "content": "a"}]}),
    "has no chat template": ("", CHATS[0]),
    "the chat template refuses it: no system": ("{{ raise_exception('no system') }}", CHATS[0]),
    "the chat template writes the beginning up to message 3 otherwise": (UNSTABLE, CHATS[1]),
}


@pytest.mark.parametrize("problem", BAD)
def test_bad_examples_are_named(problem: str, tmp_path: Path, folder: Path) -> None:
    template, line = BAD[problem]
    tokenizer = load_tokenizer(str(folder))
    tokenizer.hf.chat_template = template
    file = jsonl(tmp_path / "a.jsonl", [PROMPTS[0], line, PROMPTS[1]])
    with pytest.raises(DataError) as refused:
        examples_of(str(file), tokenizer, tmp_path / "cache")
    (item,) = refused.value.items
    assert item.startswith(f"{file}:2: ")
    assert problem in item
    assert not list((tmp_path / "cache").iterdir())


def test_fine_tuning_needs_a_tokenizer_and_examples(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = jsonl(tmp_path / "a.jsonl", [{"messages": [{"role": "user", "content": "Hello?"}]}])
    config = config_of(tmp_path, {"kind": "sft", "paths": [str(file)]})
    with pytest.raises(DataError, match=r"`data\.kind` = `sft` needs a tokenizer"):
        provided(config, None, (8, 0, 0))
    with pytest.raises(DataError, match="has no example with anything to learn"):
        provided(config, tokenizer, (8, 0, 0))
