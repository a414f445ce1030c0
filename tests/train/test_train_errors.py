"""Bad input: one rank says what is wrong and what to do, the others say nothing, and nobody hangs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from mcore_convert.errors import ConvertError
from tests.conftest import HfMaker
from tests.ranks import run_ranks
from tests.ready import prepared
from tests.warm import environment
from train_entry.config.compose import load_config
from train_entry.initialize import OtherRankError
from train_entry.pretrain import pretrain

WORDS = ("training.steps=2", "logging.tensorboard=false", "logging.plot=false", "parallel.tp=2")


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer of 512 tokens and prepared data."""
    return prepared(tmp_path_factory.mktemp("tokens"), 512)


def indexed(folder: Path) -> list[str]:
    return ["data=indexed", f"data.paths=[{folder}/text_text_document]", f"data.tokenizer={folder}/tokenizer"]


def output_of(*words: str, run_dir: Path, name: str = "tiny-gpt2") -> str:
    """Return what the one rank that speaks says of a run on two."""

    def refused() -> tuple[bool, str]:
        try:
            pretrain(load_config(name, [*WORDS, f"run_dir={run_dir}", *words]))
        except ConvertError as error:
            return isinstance(error, OtherRankError), str(error)
        return False, "nothing was refused"

    answers: list[tuple[bool, str]] = run_ranks(2, refused)
    assert [silent for silent, _ in answers].count(False) == 1
    return next(text for silent, text in answers if not silent)


def test_missing_data(tmp_path: Path) -> None:
    text = output_of("data=indexed", f"data.paths=[{tmp_path}/none]", run_dir=tmp_path / "run")
    assert f"{tmp_path}/none.bin" in text
    assert not (tmp_path / "run").exists()


def test_an_index_that_does_not_fit_its_data(tmp_path: Path, tokens: Path) -> None:
    for file in tokens.glob("text_text_document*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    cut = tmp_path / "text_text_document.bin"
    os.truncate(cut, cut.stat().st_size - 10)
    text = output_of("data=indexed", f"data.paths=[{tmp_path}/text_text_document]", run_dir=tmp_path / "run")
    assert str(cut) in text
    assert ".idx" in text


def test_a_tokenizer_larger_than_the_vocabulary(tmp_path: Path, tokens: Path) -> None:
    text = output_of(*indexed(tokens), "model.vocab_size=300", run_dir=tmp_path / "run")
    assert "512" in text
    assert "300" in text


def test_a_world_that_the_layout_does_not_divide(tmp_path: Path) -> None:
    text = output_of("parallel.pp=2", run_dir=tmp_path / "run")
    assert "there are 2" in text
    assert "torchrun --nproc-per-node 4" in text


def test_a_checkpoint_of_another_architecture(tmp_path: Path, hf_checkpoint: HfMaker) -> None:
    text = output_of(f"checkpoint.init={hf_checkpoint('llama-gqa')}", run_dir=tmp_path / "run")
    assert "another architecture" in text
    assert "normalization: 'LayerNorm', where the checkpoint has 'RMSNorm'" in text


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["optimzer.lr=1"], "optimizer"),
        (["training.flow=nowhere:Flow"], "nowhere"),
        (["checkpoint.init=/nowhere/model"], "/nowhere/model"),
        (["data=sft", "data.paths=[/nowhere.jsonl]"], "/nowhere.jsonl"),
    ],
)
def test_other_words_that_lead_nowhere(words: list[str], expected: str, tmp_path: Path) -> None:
    if words[0].startswith("optimzer"):
        with pytest.raises(ConvertError, match=expected):
            load_config("tiny-gpt2", words)
    else:
        assert expected in output_of(*words, run_dir=tmp_path / "run")


def test_a_loss_that_is_no_number(tmp_path: Path) -> None:
    text = output_of("optimizer.lr=1e30", "optimizer.clip_grad=0", "training.steps=20", run_dir=tmp_path / "run")
    assert "the loss of step" in text
    assert not list((tmp_path / "run" / "checkpoints").glob("iter_*"))


def test_torchrun_ends_with_the_error(warm: Path, tmp_path: Path) -> None:
    words = [*WORDS, "parallel.pp=2", f"run_dir={tmp_path / 'run'}"]
    done = subprocess.run(
        [warm / "torchrun", "--nproc-per-node", "2", "-m", "train_entry", "tiny-gpt2", *words],
        capture_output=True,
        text=True,
        timeout=120,
        env={**environment(warm), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 1
    assert [line for line in done.stderr.splitlines() if line.startswith("error: ")] == [error_of(done.stderr)]
    last = done.stderr.strip().splitlines()[-2:]
    assert "torchrun --nproc-per-node 4" in last[0] or "torchrun --nproc-per-node 4" in last[1]


def error_of(text: str) -> str:
    return next(line for line in text.splitlines() if line.startswith("error: "))
