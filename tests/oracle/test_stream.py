"""A model of the Hub that is converted while it comes: the bytes of a download, and no room for one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfFileSystem, constants

from fixtures.hub import Hub
from mcore_convert import convert, push
from tests.conftest import HfMaker
from tests.hub import client_of_a_hub
from tests.refusals import run, tree


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with client_of_a_hub(tmp_path / "home") as hub:
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
        template = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        HfFileSystem.clear_instance_cache()
        yield hub
    HfFileSystem.clear_instance_cache()


def on_disk(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def test_a_stream(hub: Hub, hf_checkpoint: HfMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    convert(hf_checkpoint("llama-gqa"), tmp_path / "dist")
    convert(tmp_path / "dist", tmp_path / "source", max_shard_size=100_000)
    (tmp_path / "source" / "mcore_convert.json").unlink()
    push(tmp_path / "source", "ada/model")
    here = tmp_path / "here"
    here.mkdir()
    options: dict[str, Any] = {"tp": 2, "tokenizer": "t"}
    before, used = on_disk(tmp_path), [0]
    convert("ada/model", here / "streamed", stream=True, progress=lambda *_: used.append(on_disk(tmp_path)), **options)
    assert not list((tmp_path / "home").rglob("*.safetensors"))
    shard = max(file.stat().st_size for file in (tmp_path / "source").glob("*.safetensors"))
    assert len(list((tmp_path / "source").glob("*.safetensors"))) > 4
    assert before < max(used) <= before + on_disk(here / "streamed") + 2 * shard
    convert("ada/model", tmp_path / "whole", **options)
    streamed, whole = tree(here / "streamed"), tree(tmp_path / "whole")
    assert sorted(streamed) == sorted(whole)
    assert [name for name in whole if streamed[name] != whole[name]] == ["megatron_args.txt"]  # which names its place


def test_what_cannot_be_streamed(hub: Hub, hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    source = hf_checkpoint("gpt2", tokenizer=False)
    messages: dict[tuple[str | Path, ...], str] = {
        (source, "--stream"): "a directory has no use for --stream",
        ("ada/none", "--stream"): "`ada/none` is neither a directory nor a model on the Hub",
        ("./none", "--stream"): "does not exist",
        ("ada/none", "--stream", "--revision", "v1"): "neither a directory nor a model",
    }
    for words, message in messages.items():
        ended = run("convert", words[0], tmp_path / "DST", *words[1:])
        assert (ended.code, message in " ".join(ended.err.split())) == (1, True), ended
    assert not list(tmp_path.glob("DST*"))
