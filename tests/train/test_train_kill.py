"""A run that is killed while it saves, again and again, goes on from a whole checkpoint every time."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader

from fixtures.megatron import random_weights
from mcore_convert.spec.layout import Layout
from mcore_convert.storage.marker import PARTIAL, REMOVED, new_id, unfinished
from tests.ranks import run_ranks
from tests.saved_runs import SEVERAL_BUCKETS, SMALL, config_of, train, trained
from train_entry.checkpoints.folder import clean, complete, newest
from train_entry.config.schema import Config

KEEP = 2
STEPS = 30  # more than the kills let happen
ARGS = {**SMALL, **SEVERAL_BUCKETS}
LAYOUT, RANKS = Layout(), 2  # two data-parallel ranks
CHANGES = ("open", "pwrite", "close", "rename", "mkdir", "unlink", "rmdir")  # functions that change a file system
TRACKER = "latest_checkpointed_iteration.txt"


class Uninterrupted(NamedTuple):
    """The run that nobody kills: what it starts from, its losses, and the number of calls in a save, aside or not."""

    start: dict[str, Any]
    losses: list[float]
    calls: dict[bool, int]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Uninterrupted:
    start: dict[str, Any] = {"weights": random_weights(SMALL)}
    losses: list[float] = []
    calls = {}
    for asynchronous in (False, True):
        path = tmp_path_factory.mktemp("uninterrupted")
        config = config_of(path, distributed=True, asynchronous=asynchronous)

        def counted(config: Config = config, asynchronous: bool = asynchronous) -> tuple[list[float], int]:
            number = 0

            def count() -> None:
                nonlocal number
                number += 1

            def report(line: str) -> None:
                if line in ("save 3", "saved 3"):
                    profile(count if line == "save 3" else None, asynchronous)

            until = 4 if asynchronous else STEPS
            return train(ARGS, LAYOUT, config, until=until, save_at=[1, 3], report=report, **start).losses, number

        result, calls[asynchronous] = run_ranks(RANKS, counted)[0]
        losses = max(losses, result, key=len)
    return Uninterrupted(start, losses, calls)


def profile(called: Callable[[], None] | None, asynchronous: bool) -> None:
    """Let a function be called whenever Python calls another or returns, in this thread or in those that it starts."""
    install = threading.setprofile if asynchronous else sys.setprofile
    install(None if called is None else lambda *_: called())


def killed(
    config: Config, *, at_save: int, rank: int, after_calls: int, scratch: Path, **start: Any
) -> list[list[str]]:
    """Start a run that saves after each step in processes of their own, and kill all of them when one of its ranks has
    made so many calls within a save; returns what the first rank reported."""
    reads, writes = os.pipe()
    torch.set_num_threads(1)
    process = os.fork()
    if process == 0:
        os.setpgid(0, 0)  # the ranks, which it starts, belong to it
        tempfile.tempdir = str(scratch)
        os.close(reads)
        left = after_calls

        def kill() -> None:
            nonlocal left
            left -= 1
            if left < 0:
                os.killpg(0, signal.SIGKILL)

        def report(line: str) -> None:
            nonlocal at_save
            if dist.get_rank() == 0:
                os.write(writes, f"{line}\n".encode())
            at_save -= line.startswith("save ")
            if at_save == 0 and dist.get_rank() == rank:
                profile(kill, config.checkpoint.asynchronous)

        try:
            whole = {"until": STEPS, "save_at": range(STEPS), "report": report, **start}
            run_ranks(RANKS, lambda: train(ARGS, LAYOUT, config, **whole))
        except BaseException as error:
            os.write(writes, f"failed {error}\n".encode())
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as pipe:
        text = pipe.read()
    _, status = os.waitpid(process, 0)
    assert os.WIFSIGNALED(status), text
    return [line.split() for line in text.splitlines()]


def iterations(folder: Path) -> list[int]:
    """Return the checkpoints that look whole."""
    return sorted(int(path.name[5:]) for path in folder.glob("iter_*") if path.suffix not in (PARTIAL, REMOVED))


def resumable(folder: Path) -> int:
    """Return the iteration that Megatron-LM would go on from;
    a whole one that a kill kept from the tracker may be newer.
    """
    there = iterations(folder)
    tracked = int((folder / TRACKER).read_text()) if (folder / TRACKER).exists() else max([0, *there])
    assert tracked in [*there, 0]
    return tracked


def assert_whole(path: Path) -> None:
    """By torch's own reader: every chunk lies within its file, and the common state is that of this iteration."""
    metadata = FileSystemReader(path).read_metadata()
    assert metadata.storage_data
    for info in metadata.storage_data.values():
        assert (path / info.relative_path).stat().st_size >= info.offset + info.length
    assert torch.load(path / "common.pt", weights_only=False)["iteration"] == int(path.name[5:])


@pytest.mark.parametrize("kills", [3, pytest.param(10, marks=pytest.mark.wide)])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["foreground", "background"])
def test_killed_while_saving(asynchronous: bool, kills: int, uninterrupted: Uninterrupted, tmp_path: Path) -> None:
    """So many times, at random moments of as many equal parts of a save, which ends with an older one removed."""
    chance = random.Random(7 + asynchronous)
    config = config_of(tmp_path / "run", distributed=True, keep_last=KEEP, asynchronous=asynchronous)
    folder = tmp_path / "run/checkpoints"
    partial = 0
    calls = uninterrupted.calls[asynchronous]
    for part in range(kills):
        before = resumable(folder)
        lines = killed(
            config,
            at_save=(1, 2, 4)[part % 3],
            rank=chance.randrange(RANKS),
            after_calls=chance.randrange(part * calls // kills, (part + 1) * calls // kills),
            scratch=tmp_path,
            **uninterrupted.start,
        )
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
    assert partial >= kills // 3, "the kills came at other moments than within a save"
    last = resumable(folder)
    outcome = trained(ARGS, LAYOUT, config, ranks=RANKS, until=last + 2, save_at=[last + 1])
    assert outcome.restored.iteration == last
    assert outcome.losses == uninterrupted.losses[last : last + 2]
    assert {path.name for path in folder.iterdir()} == {f"iter_{n:07d}" for n in (last, last + 1)} | {TRACKER}


@pytest.mark.parametrize("iteration", [4, 3], ids=["the next", "one that is there"])
def test_killed_at_each_change_while_a_checkpoint_gets_its_name(iteration: int, tmp_path: Path) -> None:
    """Every moment between the last byte of a checkpoint and the removal of the oldest one."""
    source = tmp_path / "source"
    config = config_of(source, distributed=True)
    start = {"weights": random_weights(SMALL)}
    trained(ARGS, LAYOUT, config, ranks=RANKS, until=3, save_at=[1, 2, 3], **start)
    written = unfinished(source / "checkpoints" / f"iter_{iteration:07d}", new_id())
    shutil.copytree(source / "checkpoints/iter_0000003", written)
    (written / "common.pt").unlink()
    files = {"common.pt": (source / "checkpoints/iter_0000003/common.pt").read_bytes()}
    if iteration == 3:  # as after going back to the second
        (source / "checkpoints" / TRACKER).write_text("2")
    result: list[str] = []
    calls = 0
    while not result or result[-1] != "done":
        folder = Path(shutil.copytree(source / "checkpoints", tmp_path / f"killed{calls}"))
        process = os.fork()
        if process == 0:
            mock.patch.object(os, "fsync").start()  # a kill does not lose what was written, as a power failure does
            left = calls

            def kill(_: Any, event: str, function: Any) -> None:
                nonlocal left
                left -= event == "c_call" and getattr(function, "__name__", "") in CHANGES
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

            sys.setprofile(kill)
            complete(folder / written.name, files, keep_last=2)
            sys.setprofile(None)
            os._exit(0)
        _, status = os.waitpid(process, 0)
        there = newest(folder)
        assert there.path is not None
        assert there.damaged == ()
        result.append("done" if os.WIFEXITED(status) else there.path.name)
        clean(folder)
        assert newest(folder) == there
        shutil.rmtree(folder)
        calls += 1
    first = "iter_0000003" if iteration == 4 else "iter_0000002"
    changes = [name for number, name in enumerate(result) if number == 0 or result[number - 1] != name]
    assert changes == [first, f"iter_{iteration:07d}", "done"]
    assert len(result) > 20
