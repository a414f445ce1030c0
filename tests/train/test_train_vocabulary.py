"""A new model has the vocabulary of its tokenizer, with every ready run; what does not fit is refused beforehand."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from mcore_convert.cli import app
from mcore_convert.errors import ConfigError, DataError
from tests.conftest import HfMaker
from tests.ready import FROM_CHECKPOINTS, NEW_MODELS, ROWS, data_of, prepared, start_of
from train_entry.checked import checked
from train_entry.config.compose import load_config
from train_entry.config.layouts import ranks_of
from train_entry.config.schema import Config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of 700 tokens, and data made with it."""
    return prepared(tmp_path_factory.mktemp("vocabulary"), 700)


def config_of(name: str, folder: Path, *words: str) -> Config:
    data = ["data=indexed", f"data.paths=[{folder}/text_text_document]"]
    return load_config(name, [f"run_dir={folder}/run", *data, *words])


@pytest.mark.parametrize("name", NEW_MODELS)
def test_ready_runs_take_the_vocabulary_of_the_tokenizer(name: str, folder: Path) -> None:
    config = config_of(name, folder, f"data.tokenizer={folder}/tokenizer", "parallel=single")
    run = checked(config, 1, None)
    assert (run.args["vocab_size"], run.args["padded_vocab_size"]) == (700, 768)
    assert run.vocabulary == f"vocabulary: 700 tokens, of the tokenizer `{folder}/tokenizer`; 768 rows"


@pytest.mark.parametrize("name", FROM_CHECKPOINTS)
def test_ready_runs_keep_the_vocabulary_of_their_checkpoint(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hf_checkpoint: HfMaker
) -> None:
    monkeypatch.chdir(tmp_path)
    start = start_of(name, tmp_path, hf_checkpoint)
    config = load_config(name, [f"run_dir={tmp_path}/run", *data_of(name, tmp_path), *start])
    run = checked(config, ranks_of(config.parallel), None)
    assert run.tokenizer is not None
    assert (run.tokenizer.vocab_size, run.args["vocab_size"]) == (ROWS, ROWS)
    rows = 128 * config.parallel.tp * -(-ROWS // (128 * config.parallel.tp))
    assert run.vocabulary == f"vocabulary: 421 tokens, of the checkpoint; {rows} rows"


def test_where_else_a_vocabulary_comes_from(folder: Path) -> None:
    of_data = checked(config_of("gpt3-857m", folder), 1, None)
    assert (of_data.args["vocab_size"], of_data.tokenizer) == (700, None)
    assert "of the tokenizer of the data" in of_data.vocabulary
    made_up = checked(load_config("gpt2-small", ["data=mock"]), 1, None)
    assert (made_up.args["vocab_size"], made_up.args["padded_vocab_size"]) == (50257, 50304)
    assert "no tokenizer is named" in made_up.vocabulary
    chosen = config_of("tiny-gpt2", folder, f"data.tokenizer={folder}/tokenizer", "model.vocab_size=1000")
    assert checked(chosen, 1, None).args["vocab_size"] == 1000
    with pytest.raises(ConfigError, match=r"`model.vocab_size` \(or `data.tokenizer`\)"):
        checked(load_config("tiny-gpt2", ["model.default_vocab_size=null"]), 1, None)


def test_a_tokenizer_larger_than_the_model(folder: Path) -> None:
    words = [f"data.tokenizer={folder}/tokenizer", "model.vocab_size=512"]
    with pytest.raises(DataError, match="has 700 tokens, the model's vocabulary 512"):
        checked(config_of("tiny-gpt2", folder, *words), 1, None)
    done = CliRunner().invoke(app, ["train", "tiny-gpt2", *words, f"run_dir={folder}/run", "--dry-run"])
    assert isinstance(done.exception, DataError)
