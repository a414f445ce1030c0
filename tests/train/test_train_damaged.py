"""Checkpoints that are damaged, do not fit, or cannot be written: told on every rank, and what is whole stays so."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fixtures.megatron import random_weights
from mcore_convert import ConvertError
from mcore_convert.errors import UnwritableTarget
from mcore_convert.spec.layout import Layout
from mcore_convert.storage.marker import REMOVED, finished_name, new_id, unfinished
from tests.ranks import run_ranks
from tests.saved_runs import SMALL, Outcome, config_of, train, trained
from tests.wide import matrix
from train_entry.checkpoints import Checkpoints
from train_entry.checkpoints.folder import newest
from train_entry.checkpoints.ranks import Ranks
from train_entry.config.schema import Config
from train_entry.initialize import OtherRankError

TRACKER = "latest_checkpointed_iteration.txt"
RANKS = 2
FILES = ("__1_0.distcp", ".metadata", "common.pt", "metadata.json")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks with checkpoints of steps 1, 2 and 3."""
    path = tmp_path_factory.mktemp("saved")
    trained(SMALL, Layout(tp=2), config_of(path), until=3, save_at=[1, 2, 3], weights=random_weights(SMALL))
    return path


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run"))


def run(config: Config, **options: Any) -> Outcome:
    return trained(SMALL, Layout(), config, **options)


def refusals(function: Callable[[], Any]) -> list[ConvertError]:
    """Return the refusal of each rank."""

    def caught() -> ConvertError:
        with pytest.raises(ConvertError) as caught:
            function()
        return caught.value

    errors: list[ConvertError] = run_ranks(RANKS, caught)
    return errors


def iterations(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir() if path.name != TRACKER)


def truncate(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


@pytest.mark.parametrize(
    "file", matrix(((file,) for file in FILES), thin=lambda file: file in ("__1_0.distcp", "metadata.json"))
)
def test_the_one_before_a_damaged_one_is_used(file: str, copy: Path) -> None:
    path = copy / "checkpoints/iter_0000003" / file
    if file == "metadata.json":
        path.unlink()
    else:
        truncate(path)
    result = run(config_of(copy), until=4, save_at=[3, 4])
    assert result.restored.path == copy / "checkpoints/iter_0000002"
    assert result.restored.notes[0].startswith("damaged, and not used: ")
    assert "iter_0000003" in result.restored.notes[0]
    again = run(config_of(copy), until=4)
    assert again.restored.path == copy / "checkpoints/iter_0000004"  # the damaged one was replaced on the way
    assert iterations(copy) == [f"iter_000000{number}" for number in (1, 2, 3, 4)]


def test_where_none_is_whole_nothing_is_trained(copy: Path) -> None:
    for path in copy.glob("checkpoints/iter_*/__0_0.distcp"):
        truncate(path)
    first, second = refusals(lambda: train(SMALL, Layout(tp=2), config_of(copy), until=4))
    assert str(first).count("is not whole") == 3
    assert "checkpoint.resume=false" in str(first)
    assert isinstance(second, OtherRankError)
    anew = run(config_of(copy, resume=False), until=1, weights=random_weights(SMALL))
    assert anew.restored.path is None


def test_the_tracker_is_a_way_back(copy: Path) -> None:
    (copy / "checkpoints" / TRACKER).write_text("2")
    result = run(config_of(copy, keep_last=1), until=3, save_at=[3])
    assert result.restored.iteration == 2
    assert iterations(copy) == ["iter_0000003"]
    assert (copy / "checkpoints" / TRACKER).read_text() == "3"


@pytest.mark.parametrize(
    ("message", "name"), [("release", "release"), ("2\n", "iter_0000002"), ("7", "iter_0000003"), ("?", "iter_0000003")]
)
def test_the_tracker_says_which_is_the_newest(message: str, name: str, copy: Path) -> None:
    (copy / "checkpoints/iter_0000001").rename(copy / "checkpoints/release")
    (copy / "checkpoints" / TRACKER).write_text(message)
    assert newest(copy / "checkpoints").path == copy / "checkpoints" / name


def test_the_last_ones_are_kept(copy: Path) -> None:
    unfinished(copy / "checkpoints/iter_0000009", new_id()).mkdir()
    (copy / "checkpoints/iter_0000001").rename(unfinished(copy / "checkpoints/iter_0000001", new_id(), REMOVED))
    theirs = [copy / "checkpoints" / name for name in ("iter_0000006.partial", "iter_0000001.removed", "mine.partial")]
    for each in theirs:
        each.mkdir()
        (each / "mine.txt").write_text("mine")
    run(config_of(copy, keep_last=2), until=6, save_at=[4, 6])
    assert all((each / "mine.txt").read_text() == "mine" for each in theirs)
    assert [name for name in iterations(copy) if "." not in name] == ["iter_0000004", "iter_0000006"]
    assert not [path for path in (copy / "checkpoints").iterdir() if finished_name(path) is not None]


def test_nothing_is_saved_twice_or_without_being_asked(copy: Path) -> None:
    before = (copy / "checkpoints/iter_0000003/.metadata").stat().st_mtime_ns
    run(config_of(copy, save=False), until=4, save_at=[4])
    assert iterations(copy)[-1] == "iter_0000003"
    run(config_of(copy), until=3, save_at=[3])
    assert (copy / "checkpoints/iter_0000003/.metadata").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("rank", "asynchronous"),
    matrix(
        ((rank, later) for rank in (0, 1) for later in (False, True)), thin=lambda rank, later: later == (rank == 1)
    ),
)
def test_a_full_disk_leaves_what_was_there(rank: int, asynchronous: bool, copy: Path) -> None:
    """One rank may write no more than so many bytes into a file, as on a disk that fills up."""

    def filled() -> None:
        if dist.get_rank() == rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        train(SMALL, Layout(tp=2), config_of(copy, asynchronous=asynchronous), until=5, save_at=[5])

    first, second = refusals(filled)
    assert isinstance(first, UnwritableTarget)
    assert first.message.endswith(f"iter_0000005` cannot be written: rank {rank}: File too large")
    assert isinstance(second, OtherRankError)
    assert iterations(copy) == [f"iter_000000{number}" for number in (1, 2, 3)]
    assert newest(copy / "checkpoints").path == copy / "checkpoints/iter_0000003"
    assert run(config_of(copy), until=5, save_at=[5]).restored.iteration == 3


def test_another_architecture_is_refused_by_name(copy: Path) -> None:
    other = {**SMALL, "num_layers": 2, "swiglu": False, "rotary_base": 500000}
    first, second = refusals(lambda: train(other, Layout(tp=2), config_of(copy), until=4))
    assert "another architecture" in first.message
    assert first.items == ("num_layers = 4, here 2", "swiglu = True, here False", "rotary_base = 10000, here 500000")
    assert second.items == first.items


def test_a_tensor_of_another_size_is_refused_before_any_is_loaded(copy: Path) -> None:
    """The arguments may lie: each tensor's size is held against the checkpoint's."""
    file = copy / "checkpoints/iter_0000003/common.pt"
    common = torch.load(file, weights_only=False)
    common["args"].ffn_hidden_size = 32
    torch.save(common, file)
    first, _ = refusals(lambda: train({**SMALL, "ffn_hidden_size": 32}, Layout(tp=2), config_of(copy), until=4))
    assert "does not fit the model" in first.message
    assert "decoder.layers.mlp.linear_fc2.weight: [4, 32, 48], where the model has [4, 32, 32]" in first.items


def test_a_checkpoint_without_optimizer_starts_its_moments_anew(copy: Path, tmp_path: Path) -> None:
    run(config_of(tmp_path / "weights", load=copy, save_optimizer=False), until=4, save_at=[4])
    result = run(config_of(tmp_path / "weights"), until=5)
    assert result.restored.iteration == 4
    assert any("its moments start anew" in note for note in result.restored.notes)


def test_a_directory_that_ranks_do_not_share_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train_entry.checkpoints.checkpoints.PROBE_SECONDS", 0.2)
    for error in refusals(lambda: Checkpoints(config_of(tmp_path / str(dist.get_rank())))):
        assert "is not the same directory on all ranks" in error.message


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for error in refusals(lambda: Checkpoints(config_of(tmp_path / "file/run"))):
        assert "cannot be written" in error.message


def test_what_is_no_refusal_keeps_its_traceback_on_its_rank() -> None:
    def fails() -> str:
        ranks = Ranks.all()

        def divide() -> float:
            return 1 / (1 - dist.get_rank())

        try:
            ranks.every(divide)
        except ZeroDivisionError:
            return "mine"
        except OtherRankError as error:
            return error.message
        return "nothing"

    assert run_ranks(RANKS, fails) == ["on rank 1: ZeroDivisionError('division by zero')", "mine"]
