"""A path with a slip is answered with the one that was meant, before a run starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_convert.errors import ConvertError
from train_entry import load_config
from train_entry.checkpoints.source import source_of
from train_entry.config.inputs import problems_of_data, problems_of_start
from train_entry.data.sources import Reading
from train_entry.data.sources import source_of as source_of_data


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("stories_text_document.bin", "stories_text_document.idx", "answers.jsonl"):
        Path(name).touch()
    Path("models/llama").mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["checkpoint.init=./models/lama"],
            "`checkpoint.init` = ./models/lama does not exist; did you mean `models/llama`?",
        ),
        (
            ["checkpoint.load=models/lama"],
            "`checkpoint.load` = models/lama does not exist; did you mean `models/llama`?",
        ),
        (
            ["data=sft", "data.paths=[answer.jsonl]"],
            "`data.paths`: `answer.jsonl` does not exist; did you mean `answers.jsonl`?",
        ),
        (
            ["data=indexed", "data.train_paths=[story_text_document]"],
            "`data.train_paths`: `story_text_document.bin` and `story_text_document.idx` do not exist; "
            "did you mean `stories_text_document`?",
        ),
        (["checkpoint.load=elsewhere"], "`checkpoint.load` = elsewhere does not exist"),
    ],
)
def test_what_a_run_reads(words: list[str], line: str, here: Path) -> None:
    config = load_config("tiny-gpt2", words)
    assert line in [*problems_of_data(config), *problems_of_start(config)]


def test_what_is_read_without_a_check_before(here: Path) -> None:
    with pytest.raises(ConvertError) as refused:
        source_of(load_config("tiny-gpt2", [f"run_dir={here}/run", "checkpoint.load=models/lama"]))
    assert refused.value.message == "`models/lama` does not exist"
    assert refused.value.hint == "did you mean `models/llama`?"
    with pytest.raises(ConvertError, match=r"`answer\.jsonl` does not exist; did you mean `answers\.jsonl`\?"):
        source_of_data("answer.jsonl", Reading())
