"""A name that almost exists is pointed out before the Hub is asked, and a Hub that is not there is noticed at once."""

from __future__ import annotations

import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from mcore_convert.checkpoints import download as sources
from mcore_convert.storage.paths import near_miss
from tests.conftest import HfMaker
from tests.refusals import run


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """No test knows of another's Hub."""
    asked = sources._no_sign_of
    asked.cache_clear()
    yield
    asked.cache_clear()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hf_checkpoint: HfMaker) -> Path:
    """A folder with a model and the file of a run; the Hub must not be asked."""
    shutil.copytree(hf_checkpoint("llama-gqa"), tmp_path / "models" / "tiny-llama")
    (tmp_path / "tiny-llama").symlink_to("models/tiny-llama")
    (tmp_path / "stories.yaml").write_text("defaults: [tiny-gpt2]\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_what_was_meant(here: Path) -> None:
    Path("Llama-3.2-1B").mkdir()
    meant = {
        "tiny-lama": "tiny-llama",
        "model/tiny-llama": "models/tiny-llama",
        "models/tiny_llama": "models/tiny-llama",
        "stories.yml": "stories.yaml",
        "Llama-3.2-1b": "Llama-3.2-1B",
    }
    for slip, path in meant.items():
        assert near_miss(Path(slip)) == Path(path), slip
    for other in ("Llama-3.2-3B", "gpt2", "model/other", "models/tiny-llama-instruct-chat", "tiny-llama/tiny"):
        assert near_miss(Path(other)) is None, other


@pytest.mark.parametrize(
    "words",
    [
        ["convert", "tiny-lama", "out"],
        ["verify", "tiny-llama", "tiny-lama"],
        ["diff", "tiny-lama", "tiny-llama"],
        ["inspect", "tiny-lama"],
        ["reshard", "tiny-lama", "out"],
        ["export", "tiny-lama"],
        ["export", "tiny-lama", "--all"],
        ["push", "tiny-lama", "ada/model"],
        ["data", "prepare", "stories.yaml", "out", "--format", "text", "--tokenizer", "tiny-lama"],
    ],
    ids=lambda words: " ".join(words[:3]),
)
def test_a_slip_is_pointed_out(words: list[str], here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(sources, "_no_sign_of", lambda endpoint: pytest.fail("the Hub is asked"))
    ended = run(*words)
    assert ended.code in (1, 2)
    assert ended.err.splitlines()[-2:] == [
        "error: `tiny-lama` does not exist",
        "hint: did you mean `tiny-llama`?",
    ]


def test_a_slip_in_the_name_of_a_run(here: Path) -> None:
    assert "did you mean `stories.yaml`?" in run("train", "stories.yml", "--print-config").err
    assert "did you mean `tiny-gpt2`?" in run("train", "tiny-gtp2", "--print-config").err


def test_a_revision_says_that_it_is_a_model_of_the_hub(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    message = run("convert", "tiny-lama", "out", "--revision", "main").err
    assert message.startswith(
        "error: `tiny-lama` is no directory, and the Hub cannot be reached: HF_HUB_OFFLINE is set\n"
    )


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A Hub that takes connections and never answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.delenv("HF_HUB_ETAG_TIMEOUT", raising=False)
        yield


@pytest.mark.parametrize("lookup", ["fails", "hangs", "connects"])
def test_a_hub_that_is_not_there_is_noticed_at_once(
    lookup: str, silent: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is wrong with the network, each command that asks the Hub ends soon: what it repeats is not begun."""
    from transformers import AutoTokenizer  # what takes its time is imported before that is measured

    assert AutoTokenizer is not None
    assert sources.PATIENCE < 5
    monkeypatch.setattr(sources, "PATIENCE", 0.3)
    run("convert", ".", tmp_path / "out")
    if lookup != "connects":

        def no_address(*_: object, **__: object) -> None:
            if lookup == "hangs":
                time.sleep(20)
            raise socket.gaierror(-2, "Name or service not known")

        monkeypatch.setattr(socket, "getaddrinfo", no_address)
    begin = time.monotonic()
    ended = run("convert", "no-such/model", tmp_path / "out")
    assert time.monotonic() - begin < 5.0
    assert ended.code == 1
    assert ended.err.startswith("error: `no-such/model` is no directory, and the Hub cannot be reached: ")
    text = tmp_path / "text.txt"
    text.write_text("a text\n")
    begin = time.monotonic()
    ended = run("data", "prepare", text, tmp_path / "out", "--tokenizer", "no-such/tokenizer")
    assert time.monotonic() - begin < 5.0
    assert "was not downloaded before, and the Hub cannot be reached: " in ended.err


def test_what_was_downloaded_before_serves_offline(
    hf_checkpoint: HfMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = hf_checkpoint("llama-gqa")
    cached = tmp_path / "models--ada--model"
    shutil.copytree(source, cached / "snapshots" / ("1" * 40))
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("1" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert run("verify", "ada/model", source).code == 0
    assert run("verify", "ada/other", source).code == 2
