"""One file is a checkpoint too: a rank's, or a model's; the folder of a rank; and a file that was passed on alone."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fixtures.old_classes import save_345m
from mcore_convert import convert, export, inspect
from mcore_convert.checkpoints.identify import identify, open_checkpoint
from mcore_convert.errors import UnreadableCheckpoint
from mcore_convert.formats.hf.checkpoint import HfCheckpoint
from tests.conftest import HfMaker, real_checkpoint
from tests.oracle.test_old_classes import GPT, gpt2
from tests.tensors import assert_same_tensors, hf_tensors

MODEL_FILE = "model_optim_rng.pt"
GIVEN = {"num_attention_heads": 4, "vocab_size": 29}


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """The file of `megatron_lm_345m`, as CodeParrot's guide ends with one."""
    return save_345m(tmp_path / "345m", gpt2().state_dict(), GPT) / "mp_rank_00" / MODEL_FILE


def test_a_file_and_what_it_lies_in_are_one_checkpoint(published: Path, tmp_path: Path) -> None:
    """Bit for bit the model of transformers that the file was made of, in halves."""
    wanted = {name: tensor.half() for name, tensor in gpt2().state_dict().items()}
    wanted.pop("lm_head.weight")
    alone, renamed = tmp_path / "downloads" / MODEL_FILE, tmp_path / "gpt2-345m.pt"
    alone.parent.mkdir()
    shutil.copy(published, alone)
    shutil.copy(published, renamed)
    places = [published, published.parent, published.parents[1], published.parents[2], alone, alone.parent, renamed]
    for number, place in enumerate(places):
        convert(place, tmp_path / f"out{number}", given=GIVEN)
        assert_same_tensors(hf_tensors(tmp_path / f"out{number}"), wanted)


def test_a_folder_of_a_rank_is_named_from_within(published: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(published.parent)
    for place in (Path(), Path(MODEL_FILE)):
        assert open_checkpoint(place, GIVEN).path.samefile(published.parents[1])


def test_one_rank_of_several_stands_for_all_of_them() -> None:
    """Megatron-LM's own file of TP 2 x PP 2, in the forms in which a user may name it."""
    run = real_checkpoint("gpt2_legacy_tp2pp2")
    whole = open_checkpoint(run)
    rank = sorted(whole.path.glob("mp_rank_*"))[-1]
    for place in (rank, rank / MODEL_FILE):
        checkpoint = open_checkpoint(place)
        assert checkpoint.path.samefile(whole.path)
        assert checkpoint.tensors == whole.tensors
    assert inspect(rank).num_files == 4


def test_a_rank_that_was_torn_from_its_run_is_refused(tmp_path: Path) -> None:
    rank = next(open_checkpoint(real_checkpoint("gpt2_legacy_tp2pp2")).path.glob("mp_rank_*"))
    shutil.copy(rank / MODEL_FILE, tmp_path / "one.pt")
    with pytest.raises(UnreadableCheckpoint) as caught:
        open_checkpoint(tmp_path / "one.pt")
    assert "mp_rank_01_001" in str(caught.value)


def test_an_export_lies_beside_the_file(published: Path, tmp_path: Path) -> None:
    renamed = Path(shutil.copy(published, tmp_path / "gpt2-345m.pt"))
    done = export(renamed, given=GIVEN, with_tokenizer=False)
    assert done.path == tmp_path / "gpt2-345m-hf"
    assert f"`{renamed.name}`" in (tmp_path / "gpt2-345m-hf/README.md").read_text()


@pytest.mark.parametrize("shards", [1, 3])
def test_a_file_of_weights_stands_for_its_directory(hf_checkpoint: HfMaker, shards: int, tmp_path: Path) -> None:
    source = hf_checkpoint("llama-gqa", shards=shards)
    file = sorted(source.glob("model*.safetensors"))[-1]
    assert identify(file).checkpoint.tensors == identify(source).checkpoint.tensors
    convert(source, tmp_path / "mcore")
    distcp = next((tmp_path / "mcore/release").glob("*.distcp"))
    assert open_checkpoint(distcp).path == distcp.parent


def test_a_file_that_its_directory_is_not_read_from_is_refused(hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    """transformers prefers `model.safetensors`; the other may hold another state of the model."""
    folder = shutil.copytree(hf_checkpoint("llama-gqa"), tmp_path / "model")
    for name in ("pytorch_model.bin", "consolidated.safetensors"):
        shutil.copy(folder / "model.safetensors", folder / name)
        with pytest.raises(UnreadableCheckpoint, match="is not what a model in its directory is read from"):
            open_checkpoint(folder / name)
    assert isinstance(open_checkpoint(folder / "model.safetensors"), HfCheckpoint)
    with pytest.raises(UnreadableCheckpoint, match="no file of a checkpoint"):
        open_checkpoint(folder / "config.json")
