"""A run that is killed while it saves, again and again, goes on from a whole checkpoint every time."""

from __future__ import annotations

import os
import random
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from fixtures.megatron import random_weights
from mcore_convert.spec.layout import Layout
from tests.ranks import run_ranks
from tests.saved_runs import SEVERAL_BUCKETS, SMALL, config_of, train, trained
from train_entry.checkpoints.folder import PARTIAL, REMOVED
from train_entry.config.schema import Config

KILLS, KEEP = 20, 2
STEPS = 50  # more than so many kills let happen
ARGS = {**SMALL, **SEVERAL_BUCKETS}
LAYOUT, RANKS = Layout(), 2  # two data-parallel ranks
TRACKER = "latest_checkpointed_iteration.txt"


class Uninterrupted(NamedTuple):
    """The run that nobody kills: its losses, how long it takes to save, and what it starts from."""

    losses: list[float]
    save_seconds: float
    start: dict[str, Any]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Uninterrupted:
    config = config_of(tmp_path_factory.mktemp("uninterrupted"), distributed=True)
    start: dict[str, Any] = {"weights": random_weights(SMALL)}

    def timed() -> tuple[list[float], list[float]]:
        times: list[float] = []
        outcome = train(
            ARGS, LAYOUT, config, until=STEPS, save_at=[2, 3, 4], told=lambda line: _note(line, times), **start
        )
        return outcome.losses, times

    losses, times = run_ranks(RANKS, timed)[0]
    return Uninterrupted(
        losses, statistics.median(end - begin for begin, end in zip(times[::2], times[1::2], strict=True)), start
    )


def _note(line: str, times: list[float]) -> None:
    if line.startswith("save"):
        times.append(time.monotonic())


def killed(config: Config, *, saves: int, delay: float, scratch: Path, **start: Any) -> list[list[str]]:
    """Start a run that saves after each step in processes of their own, and kill them all so many seconds after the
    begin of a save; returns what the first rank told."""
    reads, writes = os.pipe()
    torch.set_num_threads(1)
    process = os.fork()
    if process == 0:
        try:
            os.setpgid(0, 0)  # the ranks, which it starts, belong to it
            tempfile.tempdir = str(scratch)
            os.close(reads)

            def told(line: str) -> None:
                if torch.distributed.get_rank() == 0:
                    os.write(writes, f"{line}\n".encode())

            whole = {"until": STEPS, "save_at": range(STEPS), "told": told, **start}
            run_ranks(RANKS, lambda: train(ARGS, LAYOUT, config, **whole))
        except BaseException as error:
            os.write(writes, f"failed {error}\n".encode())
        os._exit(0)
    os.close(writes)
    lines: list[list[str]] = []
    with os.fdopen(reads) as pipe:
        for line in pipe:
            lines.append(line.split())
            assert lines[-1][0] != "failed", line + pipe.read()
            if sum(words[0] == "save" for words in lines) == saves:
                break
        time.sleep(delay)
        os.killpg(process, signal.SIGKILL)
        lines += [line.split() for line in pipe]
    os.waitpid(process, 0)
    return lines


def iterations(folder: Path) -> list[int]:
    """The checkpoints that look whole."""
    return sorted(int(path.name[5:]) for path in folder.glob("iter_*") if path.suffix not in (PARTIAL, REMOVED))


def resumable(folder: Path) -> int:
    """The iteration that Megatron-LM would go on from; a whole one that a kill kept from the tracker may be newer."""
    there = iterations(folder)
    tracked = int((folder / TRACKER).read_text()) if (folder / TRACKER).exists() else max([0, *there])
    assert tracked in [*there, 0]
    return tracked


def assert_whole(path: Path) -> None:
    """By torch's own reader: every chunk lies within its file, and no file has another size than these say."""
    metadata = FileSystemReader(path).read_metadata()
    assert metadata.storage_data
    for info in metadata.storage_data.values():
        assert (path / info.relative_path).stat().st_size >= info.offset + info.length
    assert torch.load(path / "common.pt", weights_only=False)["iteration"] == int(path.name[5:])


@pytest.mark.parametrize("asynchronous", [False, True], ids=["foreground", "background"])
def test_killed_while_saving(asynchronous: bool, uninterrupted: Uninterrupted, tmp_path: Path) -> None:
    """Twenty times in all, at moments that are random within a save, or within the removal of an older checkpoint."""
    chance = random.Random(7 + asynchronous)
    config = config_of(tmp_path / "run", distributed=True, keep_last=KEEP, asynchronous=asynchronous)
    folder = tmp_path / "run/checkpoints"
    partial = 0
    for _ in range(KILLS // 2):
        before = resumable(folder)
        delay = chance.uniform(0, 1.25 * uninterrupted.save_seconds)
        lines = killed(config, saves=chance.choice([1, 1, 2, 4]), delay=delay, scratch=tmp_path, **uninterrupted.start)
        (start,) = [int(words[1]) for words in lines if words[0] == "start"]
        assert start == before
        for words in lines:
            if words[0] == "loss":  # to the last bit
                assert float(words[2]) == uninterrupted.losses[int(words[1]) - 1]
        began = [int(words[1]) for words in lines if words[0] == "save"]
        there = iterations(folder)
        # when a save begins the one before it is there; in the background the one before that, which it waits for
        assert max([0, *there]) >= max([0, *began]) - 1 - asynchronous
        assert len(there) <= KEEP + 1
        for each in there:
            assert_whole(folder / f"iter_{each:07d}")
        partial += any(path.suffix == PARTIAL for path in folder.glob("iter_*"))
    assert partial >= KILLS // 10, "the kills came at other moments than within a save"
    last = resumable(folder)
    outcome = trained(ARGS, LAYOUT, config, ranks=RANKS, until=last + 2, save_at=[last + 1])
    assert outcome.restored.iteration == last
    assert outcome.losses == uninterrupted.losses[last : last + 2]
    assert {path.name for path in folder.iterdir()} == {f"iter_{n:07d}" for n in (last, last + 1)} | {TRACKER}
