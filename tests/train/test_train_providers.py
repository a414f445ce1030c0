"""`pretrain` as Megatron-LM has it, and providers that a configuration names: the curve is that of the run without."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_convert.errors import ConfigError, DataError
from tests.conftest import HfMaker
from tests.kinds import ROOT
from tests.ranks import run_ranks
from train_entry import load_config
from train_entry.checked import checked
from train_entry.config.schema import Config
from train_entry.pretrain import pretrain

EXAMPLES = ROOT / "examples"
WORDS = [
    *("model=checkpoint", "model.make_vocab_size_divisible_by=1", "training.seq_length=32", "training.steps=4"),
    *("training.global_batch_size=4", "training.eval_steps=1", "logging.tensorboard=false", "logging.plot=false"),
    "checkpoint=none",
]
OWN = """
import torch

class Counting(torch.utils.data.Dataset):
    def __init__(self, config, split, num_samples, tokenizer):
        self.split, self.num_samples, self.seq_length = split, num_samples, config.training.seq_length

    def __len__(self):
        return self.num_samples

    def __getitem__(self, index):
        text = (97 * index + torch.arange(self.seq_length + 1)) % 300
        row = {"tokens": text[:-1], "labels": text[1:], "loss_mask": torch.ones(self.seq_length)}
        return {**row, "position_ids": torch.arange(self.seq_length)}

class Short(Counting):
    def __getitem__(self, index):
        return {name: tensor[:7] for name, tensor in super().__getitem__(index).items()}

class Nothing(Counting):
    def __len__(self):
        return 0
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory to start a run in, with a data set of one's own; the examples can be imported, too."""
    (tmp_path / "own_data.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    for name in ("own_data", "pretrain_gpt"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def curve_of(config: Config) -> list[list[float]]:
    """Losses and norms of the gradients, and the losses of evaluations."""
    rows = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    return [[row["loss"], row.get("grad_norm", 0.0)] for row in rows]


def by_providers(config: Config) -> None:
    from megatron.core.enums import ModelType

    example = importlib.import_module("pretrain_gpt")
    providers = (example.train_valid_test_datasets_provider, example.model_provider)
    pretrain(*providers, ModelType.encoder_or_decoder, example.forward_step, config=config)


def test_own_providers_train_as_the_run_without(here: Path, hf_checkpoint: HfMaker) -> None:
    """From the same weights, at several layouts: what is called as Megatron-LM calls it, and what a run names."""
    init = f"checkpoint.init={hf_checkpoint('gpt2', fill='normal', config={'vocab_size': 300})}"

    def config(name: str, *words: str) -> Config:
        return load_config("tiny-gpt2", [*WORDS, init, f"run_dir={here}/{name}", *words])

    def runs(names: dict[str, tuple[Callable[[Config], None], Config]]) -> list[list[list[float]]]:
        for train, chosen in names.values():
            train(chosen)
        return [curve_of(chosen) for _, chosen in names.values()]

    dataset = "data.dataset=own_data:Counting"
    alone = {
        "without": (pretrain, config("without", dataset)),
        "named": (pretrain, config("named", dataset, "model.provider=pretrain_gpt:model_provider")),
        "called": (by_providers, config("called")),
    }
    several = {
        name: (by_providers, config(name, *words))
        for name, words in {"dp2": [], "tp2": ["parallel=tp2"], "pp2": ["parallel=pp2"]}.items()
    }
    (answers,) = run_ranks(1, runs, alone)
    expected = answers[0]
    assert len(expected) == 6, "four steps, and an evaluation of two data sets"
    assert expected[3][0] < expected[0][0]
    for result in [*answers[1:], *run_ranks(2, runs, several)[0]]:
        for ours, theirs in zip(result, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5)
    rows = [json.loads(line) for line in (here / "called" / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["extra"]["lm loss"] == pytest.approx(rows[0]["loss"])


def test_a_loss_function_that_returns_a_mean(here: Path, hf_checkpoint: HfMaker) -> None:
    """As in older scripts: with as many tokens in each microbatch it is the same; context parallelism refuses it."""
    init = f"checkpoint.init={hf_checkpoint('gpt2', fill='normal', config={'vocab_size': 300})}"

    def run() -> list[list[float]]:
        example = importlib.import_module("pretrain_gpt")

        def mean(data_iterator: Any, model: Any) -> Any:
            output, sums = example.forward_step(data_iterator, model)

            def loss_func(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
                total, count, _ = sums(output)
                return total / count, {"lm loss": (total / count).detach()}

            return output, loss_func

        providers = (example.train_valid_test_datasets_provider, example.model_provider)
        configs = [load_config("tiny-gpt2", [*WORDS, init, f"run_dir={here}/{name}"]) for name in ("mean", "sums")]
        pretrain(*providers, None, mean, config=configs[0])
        pretrain(*providers, None, example.forward_step, config=configs[1])
        means, sums = map(curve_of, configs)
        torch.testing.assert_close(torch.tensor(means), torch.tensor(sums), rtol=1e-5, atol=1e-5)
        return means

    assert run_ranks(1, run)[0]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("data.dataset=own_data:Countin", "`own_data` has no class `Countin`; did you mean `Counting`?"),
        ("data.dataset=own_dat:Counting", "there is no module `own_dat`"),
        ("model.provider=pretrain_gpt:provider", "has no function `provider`; did you mean `model_provider`?"),
        ("data.dataset=own_data", "is not module:Class"),
        ("training.flow=train_entry.flows:Pretrainin", "did you mean `Pretraining`?"),
    ],
)
def test_names_that_lead_nowhere_are_refused_before_the_start(word: str, message: str, here: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        checked(load_config("tiny-gpt2", [word]), 1, None)
    assert message in str(refused.value)


@pytest.mark.parametrize("word", ["data.datasett=a:B", "data.data_set=a:B", "model.providr=a:b", "provider=a:b"])
def test_a_key_is_meant(word: str) -> None:
    key = "model.provider" if "provid" in word else "data.dataset"
    with pytest.raises(ConfigError, match=f"did you mean `{key}`"):
        load_config("tiny-gpt2", [word])


@pytest.mark.parametrize(("name", "message"), [("Short", "`tokens` is [7]"), ("Nothing", "there is not one row")])
def test_items_that_are_no_rows(name: str, message: str, here: Path) -> None:
    from train_entry.data.own import own_datasets

    with pytest.raises(DataError) as refused:
        own_datasets(load_config("tiny-gpt2", [f"data.dataset=own_data:{name}"]), None, (4, 0, 0))
    assert message in str(refused.value)


@pytest.mark.parametrize(("word", "code", "last"), [("training.steps=2", 0, ""), ("steps=2", 1, "hint: ")])
def test_the_example_runs_as_it_stands(word: str, code: int, last: str, here: Path) -> None:
    words = ["tiny-gpt2", word, "training.seq_length=16", "model.num_layers=1", f"run_dir={here}/run"]

    def script() -> tuple[int, str]:
        path, messages = str(EXAMPLES / "pretrain_gpt.py"), io.StringIO()
        sys.argv[:] = [path, *words, "logging=bare", "checkpoint=none"]
        with contextlib.redirect_stderr(messages):
            try:
                runpy.run_path(path, run_name="__main__")
            except SystemExit as end:
                return int(end.code or 0), messages.getvalue()
        return 0, messages.getvalue()

    ((ended, text),) = run_ranks(1, script)
    assert ended == code, text
    assert text.strip().splitlines()[-1].startswith(last)
    assert "Traceback" not in text
    assert (here / "run" / "metrics.jsonl").exists() == (code == 0)
