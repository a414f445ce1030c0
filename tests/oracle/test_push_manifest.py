"""The manifest on the Hub: sent with its model, fit to check a download with, and removed with the model before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fixtures.hub import Fault, Hub
from fixtures.hub.store import File
from mcore_convert import export, push, verify_files
from mcore_convert.checkpoints.manifest import MANIFEST
from mcore_convert.errors import HubError, UnreadableCheckpoint
from tests.conftest import HfMaker
from tests.hub import client_of_a_hub

REPO = "ada/model"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with client_of_a_hub(tmp_path) as result:
        yield result


def test_a_manifest_goes_along(hub: Hub, hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    model, copy = tmp_path / "model", tmp_path / "copy"
    export(hf_checkpoint("llama-gqa", fill="normal"), model)
    assert MANIFEST in push(model, REPO).sent
    copy.mkdir()
    for name, file in hub.repositories[REPO].at("main").files.items():
        (copy / name).write_bytes(file.content)
    (copy / "README.md").write_text("edited on the Hub")
    assert verify_files(copy).intact

    with (copy / "model.safetensors").open("r+b") as weights:
        weights.seek(-1, 2)
        weights.write(b"\x7f")
    assert [damage.file for damage in verify_files(copy).damages] == ["model.safetensors"]

    (model / MANIFEST).unlink()  # as of a model that another program wrote
    assert push(model, REPO).removed == (MANIFEST,)

    (copy / "model.safetensors").write_bytes((copy / "model.safetensors").read_bytes().replace(b"F32", b"I32"))
    with pytest.raises(UnreadableCheckpoint, match="is not what its manifest says"):
        push(copy, REPO)


def test_what_the_hub_has_is_looked_at(hub: Hub, hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    """A Hub that says that all is well, and has half a file: no tag, and not a word of success."""
    export(hf_checkpoint("llama-gqa"), tmp_path / "model")

    def lose() -> None:
        """Cut the weights of the commit when it is looked at."""
        repository = hub.repositories[REPO]
        head = repository.at("main")
        if "model.safetensors" in head.files:
            cut = File.large(head.files["model.safetensors"].content[:1000])
            repository.branches["main"] = replace(head, files={**head.files, "model.safetensors": cut})

    hub.faults.append(Fault("GET .*/tree/.*", times=9, then=lose, served=True))
    with pytest.raises(HubError) as refused:
        push(tmp_path / "model", REPO, tag="v1")
    commit = hub.repositories[REPO].at("main").oid[:8]
    assert refused.value.message == f"`{REPO}` has not taken what was sent: its commit {commit} is no whole model"
    assert refused.value.items == ("model.safetensors: 1,000 bytes, which are not those that were sent",)
    assert hub.repositories[REPO].tags == {}
    hub.faults.clear()
    push(tmp_path / "model", REPO, tag="v1")
    content = hub.repositories[REPO].at("v1").files["model.safetensors"].content
    assert content == (tmp_path / "model/model.safetensors").read_bytes()


def test_an_answer_that_the_client_cannot_read(hub: Hub, hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    """A repository that is said to be there, by an answer without its address, which the client looks up."""
    export(hf_checkpoint("llama-gqa"), tmp_path / "model")
    hub.faults.append(Fault("POST .*/create", 409))
    with pytest.raises(HubError) as refused:
        push(tmp_path / "model", REPO)
    message = f"`{REPO}` cannot be written: the Hub's answer is not one that its client reads: KeyError: 'url'"
    assert refused.value.message == message
