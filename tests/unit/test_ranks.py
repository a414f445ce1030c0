"""Processes that share a conversion, here as threads: the same bytes as one makes, and one end for all."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mcore_convert import convert, export, reshard
from mcore_convert.conversion import copying, ranks
from mcore_convert.conversion.ranks import OtherRankError, Ranks, is_shared
from mcore_convert.errors import ConvertError, UnreadableCheckpoint
from mcore_convert.storage.destination import partial_path
from mcore_convert.storage.elements import Files
from mcore_convert.storage.marker import journals
from mcore_convert.storage.progress import Meter
from mcore_convert.storage.sources import Handle
from tests.conftest import HfMaker
from tests.unit.test_go_on import contents
from tests.warm import environment


class MemoryStore:
    """What torch.distributed's stores do, in this process."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self._lock = threading.Lock()

    def set(self, key: str, value: str) -> None:
        with self._lock:
            self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key].encode()

    def add(self, key: str, value: int) -> int:
        with self._lock:
            total = int(self.values.get(key, 0)) + value
            self.values[key] = str(total)
            return total

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        with self._lock:
            if self.values.get(key, "") == expected:
                self.values[key] = value
            return self.values[key].encode()


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for long."""
    monkeypatch.setattr(ranks, "LOOK_EVERY", 0.002)
    monkeypatch.setattr(ranks, "LAST_WORD", 0.2)


def together(size: int, work: Callable[[int], Any]) -> list[Any]:
    """Return what each of several ranks comes to: its result, or what it raises."""
    store = MemoryStore()

    def run(rank: int) -> Any:
        this = Ranks(rank, size, store)
        token = ranks._current.set(this)
        try:
            return work(rank)
        except Exception as error:
            this.fail(error)
            return error
        finally:
            ranks._current.reset(token)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("what", ["convert", "reshard", "export"])
def test_the_bytes_are_those_of_one_process(size: int, what: str, hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    source = hf_checkpoint("llama-gqa", fill="normal")
    options: dict[str, Any] = {"workers": 1}
    functions: dict[str, Callable[..., Any]] = {"convert": convert, "reshard": reshard, "export": export}
    function = functions[what]
    if what == "convert":
        options |= {"to": "torch_dist", "tp": 2, "max_shard_size": 100_000}
    if what == "reshard":
        convert(source, tmp_path / "mcore", to="torch", tp=2)
        source, options = tmp_path / "mcore", {"tp": 2, "pp": 4, **options}
    if what == "export":
        convert(source, tmp_path / "mcore", to="torch_dist")
        source, options = tmp_path / "mcore", {"with_tokenizer": False, "max_shard_size": 100_000, **options}
    destination = tmp_path / "out"
    alone = function(source, destination, **options)
    expected = contents(destination)
    destination.rename(tmp_path / "alone")
    done = together(size, lambda _: function(source, destination, **options))
    assert [type(each) for each in done] == [type(alone)] * size, done
    assert contents(destination) == expected
    assert not partial_path(destination).exists()
    assert done[0].notes == alone.notes


def test_each_opens_the_files_of_its_part_alone(
    hf_checkpoint: HfMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file is written by one rank, and only ranks that need something of a source file open it for its data."""
    opened: dict[tuple[Path, bool], set[int]] = {}
    reading, writing = Files.fd, Files.writing

    def read(self: Files, path: Path) -> Handle:
        opened.setdefault((path, False), set()).add(id(self))
        return reading(self, path)

    def written(self: Files, path: Path) -> int:
        opened.setdefault((path, True), set()).add(id(self))
        return writing(self, path)

    source = tmp_path / "source"
    convert(hf_checkpoint("llama-gqa", fill="normal"), source, to="torch", tp=2, pp=2)
    monkeypatch.setattr(Files, "fd", read)
    monkeypatch.setattr(Files, "writing", written)
    monkeypatch.setattr("mcore_convert.conversion.execute.prove", lambda checks: None)
    done, _ = together(2, lambda _: reshard(source, tmp_path / "out", tp=2, pp=2, workers=1))
    writers = {path: who for (path, write), who in opened.items() if write}
    assert len(writers) == 4
    assert all(len(who) == 1 for who in writers.values())
    assert len(set.union(*writers.values())) == 2
    readers = {path: who for (path, write), who in opened.items() if not write and path.is_relative_to(source)}
    needed: dict[Path, set[int]] = {}
    for copy in (copy for move in done.plan.moves for copy in move.copies):
        needed.setdefault(copy.source.path, set()).update(
            writers[partial_path(tmp_path / "out") / copy.target.path.relative_to(tmp_path / "out")]
        )
    assert readers == needed
    assert sum(map(len, readers.values())) < 2 * len(readers)  # what all ranks hold lies in the first one's file


def test_an_error_of_one_rank_is_reported_by_the_first(
    hf_checkpoint: HfMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = hf_checkpoint("llama-gqa", fill="normal")
    original = copying.fill

    def failing(plan: Any, mine: Any, *rest: Any) -> None:
        if ranks.current().rank == 2:
            raise UnreadableCheckpoint("the disk of this node is gone", items=["a.bin"], hint="look there")
        original(plan, mine, *rest)

    monkeypatch.setattr("mcore_convert.conversion.execute.fill", failing)
    options: dict[str, Any] = {"to": "torch", "tp": 2, "pp": 4, "workers": 1}
    done = together(3, lambda _: convert(source, tmp_path / "out", **options))
    assert [type(each) for each in done] == [ConvertError, OtherRankError, UnreadableCheckpoint]
    assert str(done[0]).splitlines()[0] == "rank 2 of 3: the disk of this node is gone"
    assert (list(done[0].items), done[0].hint) == (["a.bin"], "look there")
    assert not (tmp_path / "out").exists()
    assert journals(partial_path(tmp_path / "out"))
    monkeypatch.setattr("mcore_convert.conversion.execute.fill", original)
    again = together(2, lambda _: convert(source, tmp_path / "out", **options, resume=True))
    assert any("files were complete already" in note for note in again[0].notes)
    written = contents(tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / "first")
    convert(source, tmp_path / "out", **options)
    assert written == contents(tmp_path / "out")


def test_a_refusal_of_all_is_reported_once(hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    source = hf_checkpoint("llama-gqa", fill="normal")
    (tmp_path / "out").mkdir()
    done = together(3, lambda _: convert(source, tmp_path / "out"))
    assert "exists" in str(done[0])
    assert not str(done[0]).startswith("rank")


def test_a_silent_rank_is_taken_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "SILENCE", 0.1)
    monkeypatch.setattr(ranks, "BEAT_EVERY", 0.01)
    start = time.monotonic()
    with pytest.raises(ConvertError, match="rank 1 of 2: it has said nothing"):
        Ranks(0, 2, MemoryStore()).meet("here")
    assert time.monotonic() - start < 5


def test_progress_counts_what_was_complete_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "BEAT_EVERY", 0.01)
    seen: list[tuple[int, int]] = []
    meter = Meter(100, lambda *at: seen.append(at), done=40)
    with Ranks(0, 2, MemoryStore()).counting(meter):
        deadline = time.monotonic() + 5
        meter.add(10)
        while seen[-1:] != [(50, 100)] or len(seen) < 2:
            assert time.monotonic() < deadline, seen
            time.sleep(0.005)


@pytest.mark.parametrize("size", [1, 2, 5, 8])
def test_parts_are_all_and_even(size: int) -> None:
    sizes = {Path(f"f{number}"): number * 10 % 97 + 1 for number in range(100)}
    parts = [Ranks(rank, size, MemoryStore()).part(sizes) for rank in range(size)]
    assert sorted(path for part in parts for path in part) == sorted(sizes)
    loads = [sum(sizes[path] for path in part) for part in parts]
    assert max(loads) - min(loads) <= max(sizes.values())


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, False),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "h", "MASTER_PORT": "1"}, False),
        ({"RANK": "0", "WORLD_SIZE": "2"}, False),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}, True),
    ],
)
def test_what_torchrun_sets(environment: dict[str, str], expected: bool) -> None:
    assert is_shared(environment) is expected


@pytest.mark.slow
def test_under_torchrun(hf_checkpoint: HfMaker, warm: Path, tmp_path: Path) -> None:
    """One voice, one exit code, the bytes of one process; a killed rank ends it, and leaves work to go on with."""
    source = hf_checkpoint("llama-gqa", fill="normal")
    words = ["convert", str(source), str(tmp_path / "out"), "--to", "torch", "--tp", "2", "--pp", "4"]
    killing = "import os, signal\nfrom mcore_convert.conversion import execute\nfill = execute.fill\n"
    killing += "def killed(*words):\n    fill(*words)\n    if os.environ['RANK'] == '1':\n"
    killing += "        os.kill(os.getpid(), signal.SIGKILL)\nexecute.fill = killed\n"
    (tmp_path / "killed.py").write_text(f"{killing}from mcore_convert.cli import main\nmain()\n")
    ended = torchrun(warm, str(tmp_path / "killed.py"), *words)
    assert ended.returncode != 0
    assert "out.partial` is left, which --resume goes on with" in ended.stderr
    assert journals(tmp_path / "out.partial")
    again = torchrun(warm, "-m", "mcore_convert", *words, "--resume")
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("load it in Megatron-LM") == 1
    assert "files were complete already" in again.stderr
    written = contents(tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / "shared")
    convert(source, tmp_path / "out", to="torch", tp=2, pp=4)
    assert written == contents(tmp_path / "out")


def torchrun(warm: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a script or a module in two processes."""
    command = [str(warm / "torchrun"), "--standalone", "--nproc-per-node", "2", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment(warm))
