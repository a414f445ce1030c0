"""The manifest on the Hub: sent with its model, fit to check a download with, and removed with the model before."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fixtures.hub import Hub
from mcore_convert import export, push, verify_files
from mcore_convert.checkpoints.manifest import MANIFEST
from mcore_convert.errors import UnreadableCheckpoint
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
