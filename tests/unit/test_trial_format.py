"""A format from another package, of less than 100 lines, does what those of this one do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mcore_convert import convert, diff, export, inspect, reshard, verify
from mcore_convert.errors import ConfigError, ConvertError, UnreadableCheckpoint
from mcore_convert.formats import registry
from tests import trial_format
from tests.conftest import HfMaker, real_checkpoint


def forget() -> None:
    """Let the registry look for packages again."""
    registry.plugins.cache_clear()
    registry.formats.cache_clear()


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The format registered under the entry point, as an installed package has it."""
    point = EntryPoint("trial", "tests.trial_format:FORMAT", registry.GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [point] if group == registry.GROUP else [])
    forget()
    yield
    forget()


def test_it_is_short() -> None:
    assert len(Path(trial_format.__file__).read_text().splitlines()) <= 100


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa"])
def test_a_model_goes_through_it_and_back(name: str, hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    source, trial = hf_checkpoint(name), tmp_path / "trial"
    done = convert(source, trial, to="trial", tp=2)
    assert done.command is None  # Megatron-LM does not load it
    names = load_file(trial / trial_format.WEIGHTS)
    embedding = load_file(next(source.glob("*.safetensors")))
    whole = next(tensor for key, tensor in embedding.items() if key.endswith(("wte.weight", "embed_tokens.weight")))
    assert torch.equal(names["embedding.word_embeddings.weight"][: len(whole)], whole)
    assert verify(source, trial).equal
    assert inspect(trial, stats=True).format == "trial"
    assert not any(change.num_changed for change in diff(source, trial).changes)
    export(trial, tmp_path / "back", tokenizer=None, with_tokenizer=False)
    assert verify(source, tmp_path / "back").equal


def test_a_run_goes_through_it_to_another_layout(hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    """Its weights do: a format says whether it holds an optimizer's state, and this one does not."""
    run = real_checkpoint("llama_tp2pp2")
    done = reshard(run, tmp_path / "trial", to="trial")
    assert "optimizer state is left behind: the format `trial` has no place for it" in done.notes
    reshard(tmp_path / "trial", tmp_path / "same", tp=2)
    assert inspect(tmp_path / "same").format == "trial"
    reshard(tmp_path / "same", tmp_path / "ranks", to="torch", tp=2, pp=2)
    result = verify(run, tmp_path / "ranks")
    assert not result.differences
    assert not result.config_differences


def test_what_it_has_no_use_for_is_refused(hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match="the format `trial` has no use for --implementation"):
        convert(hf_checkpoint("llama-gqa"), tmp_path / "trial", to="trial", implementation="local")


def test_two_formats_do_not_claim_one_directory(hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    convert(hf_checkpoint("llama-gqa"), tmp_path / "trial", to="trial")
    convert(tmp_path / "trial", tmp_path / "hf")
    (tmp_path / "hf/model.safetensors").rename(tmp_path / "trial/model.safetensors")
    with pytest.raises(UnreadableCheckpoint, match="in several formats") as caught:
        inspect(tmp_path / "trial")
    assert caught.value.items == ("hf: model.safetensors", "trial: megatron.safetensors")


def test_a_name_is_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("trial", "tests.trial_format:FORMAT", registry.GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [point, point])
    forget()
    with pytest.raises(ConfigError, match="two formats are called `trial`"):
        registry.formats()
    assert json.dumps(registry.GROUP)
