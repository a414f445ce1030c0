"""Every iteration of a run exported once, whatever interrupts it, to directories and to branches."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fixtures.hub import Fault, Hub
from fixtures.run import make_run
from mcore_convert import Swept, export_all, verify
from mcore_convert.errors import ConvertError, DataError, HubError, UnreadableCheckpoint, UnwritableTarget
from tests.hub import client_of_a_hub
from tests.refusals import run

COUNT = 20
STEPS = [10 * number for number in range(1, COUNT + 1)]
CODE = "import sys; from mcore_convert.cli import main; main(sys.argv[1:])"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 20 iterations, which says that it ends with the last."""
    path = tmp_path_factory.mktemp("runs") / "run"
    return make_run(path, STEPS, config={"n_layer": 1}, args={"train_iters": STEPS[-1]}, picture=False)


@pytest.fixture
def running(finished: Path, tmp_path: Path) -> Path:
    """The same run when its first three iterations were there, to be changed."""
    path = tmp_path / "run"
    shutil.copytree(finished, path, ignore=shutil.ignore_patterns("hf", "iter_*"))
    for step in STEPS[:3]:
        arrive(finished, path, step)
    return path


def arrive(finished: Path, path: Path, step: int) -> None:
    """Save an iteration: its directory appears whole, then the tracker names it."""
    name = f"checkpoints/iter_{step:07d}"
    shutil.copytree(finished / name, path / f"{name}.partial")
    (path / f"{name}.partial").rename(path / name)
    (path / "checkpoints" / "latest_checkpointed_iteration.txt").write_text(str(step))


def states(messages: Iterator[Swept]) -> dict[int, str]:
    return {each.iteration: each.state for each in messages}


def identity(path: Path) -> tuple[int, int]:
    """Return what tells a directory from another that was made later in its place."""
    result = path.stat()
    return result.st_ino, result.st_mtime_ns


def test_interrupted_at_random_it_ends_with_all_and_none_twice(finished: Path, tmp_path: Path) -> None:
    drawn = random.Random()
    target = tmp_path / "out"
    made: dict[str, tuple[int, int]] = {}
    command = [sys.executable, "-c", CODE, "export", str(finished), str(target), "--all"]
    kills = [signal.SIGINT, signal.SIGTERM, signal.SIGKILL, signal.SIGHUP, signal.SIGKILL]
    for kind in kills:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 60
        while len(list(target.glob("iter_???????"))) <= len(made) and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        time.sleep(drawn.random() * 0.06)  # an export takes about as long: it is met in all of its phases
        assert process.poll() is None, process.communicate()
        process.send_signal(kind)
        _, messages = process.communicate(timeout=60)
        assert process.returncode == (128 + kind if kind != signal.SIGKILL else -kind), messages
        if kind != signal.SIGKILL:
            assert "the same command goes on with the others" in messages
            assert not list(target.glob("*.partial*"))
        there = {path.name: identity(path) for path in target.glob("iter_???????")}
        assert {name: there[name] for name in made} == made
        assert len(there) < COUNT
        made = there
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == f"20 iterations: {COUNT - len(made)} exported, {len(made)} there"
    assert sorted(path.name for path in target.iterdir()) == [f"iter_{step:07d}" for step in STEPS]
    assert {name: identity(target / name) for name in made} == made
    for step in STEPS:
        assert verify(finished / "checkpoints" / f"iter_{step:07d}", target / f"iter_{step:07d}").equal
    again = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert again.stdout.splitlines()[-1] == "20 iterations: 0 exported, 20 there"


def test_a_damaged_iteration_is_refused_and_the_others_go_on(running: Path) -> None:
    (running / "checkpoints" / "iter_0000020" / "__0_0.distcp").unlink()
    messages = list(export_all(running))
    assert [(each.iteration, each.state) for each in messages] == [(10, "exported"), (20, "refused"), (30, "exported")]
    assert isinstance(messages[1].error, UnreadableCheckpoint)
    shutil.rmtree(running / "hf" / "iter_0000030")
    (running / "hf" / "iter_0000010" / "model.safetensors").write_bytes(b"")
    ended = run("export", running, "--all")
    assert ended.code == 1
    assert ended.out.splitlines()[-1] == "3 iterations: 1 exported, 2 refused"
    assert [line.split(":")[:2] for line in ended.err.splitlines() if line.startswith("error")] == [
        ["error", " iteration 10"],
        ["error", " iteration 20"],
    ]
    lines = run("export", running, "--all", "--json").out.splitlines()
    assert [json.loads(line)["state"] for line in lines] == ["refused", "refused", "there"]


def test_what_is_not_complete_is_left_alone(running: Path) -> None:
    """Megatron-LM names an iteration in the tracker when it has written all of it."""
    (running / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("20")
    assert states(export_all(running)) == {10: "exported", 20: "exported"}
    assert states(export_all(running / "checkpoints", running / "elsewhere", until=10)) == {10: "exported"}
    with pytest.raises(UnreadableCheckpoint, match="is no training run"):
        list(export_all(running / "checkpoints" / "iter_0000010"))
    with pytest.raises(UnreadableCheckpoint, match="does not exist"):
        list(export_all(running / "nowhere"))


def test_a_tracker_that_is_being_written_is_waited_for(running: Path) -> None:
    tracker = running / "checkpoints" / "latest_checkpointed_iteration.txt"
    tracker.write_text("")
    with pytest.raises(UnreadableCheckpoint, match="says ``"):
        list(export_all(running))
    writing = threading.Timer(0.2, tracker.write_text, ["20"])
    writing.start()
    assert states(export_all(running)) == {10: "exported", 20: "exported"}
    writing.join()


def test_what_holds_for_all_ends_it_at_once(running: Path) -> None:
    with pytest.raises(DataError, match="has no tokenizer"):
        list(export_all(running, tokenizer=str(running)))
    (running / "hf").write_text("in the way")
    with pytest.raises(UnwritableTarget):
        list(export_all(running))


def test_it_watches_a_run_to_its_end(finished: Path, running: Path) -> None:
    """Iterations come while it watches, one goes again before it is looked at, and the last ends it."""

    def train() -> None:
        time.sleep(0.3)
        for step in (40, 50, STEPS[-1]):
            arrive(finished, running, step)
            time.sleep(0.1)

    training = threading.Thread(target=train)
    training.start()
    messages = states(export_all(running, watch=True, interval=0.05))
    training.join()
    assert messages == dict.fromkeys([10, 20, 30, 40, 50, STEPS[-1]], "exported")
    assert states(export_all(running, watch=True)) == dict.fromkeys(messages, "there")  # the run has ended


def test_a_watch_ends_on_a_signal(running: Path) -> None:
    assert states(export_all(running, watch=True, interval=0.01, until=30)) == dict.fromkeys([10, 20, 30], "exported")
    command = [sys.executable, "-c", CODE, "export", str(running), "--all", "--watch", "--interval", "0.05"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for _ in range(3):
        assert " there " in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, messages = process.communicate(timeout=30)
    assert process.returncode == 130
    assert messages == "interrupted; 0 exported; the same command goes on with the others\n"


def test_a_watch_waits_for_a_run_to_begin(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)

    def train() -> None:
        time.sleep(0.2)
        arrive(finished, tmp_path / "run", STEPS[-1])

    training = threading.Thread(target=train)
    training.start()
    assert states(export_all(tmp_path / "run", watch=True, interval=0.05)) == {STEPS[-1]: "exported"}
    training.join()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with client_of_a_hub(tmp_path) as result:
        yield result


def test_each_iteration_gets_a_branch(hub: Hub, running: Path) -> None:
    hub.faults.append(Fault("POST .*/commit/iter_0000020", 500, times=3))
    sweep = export_all(running, push_to_hub="model", private=True)
    assert next(sweep).state == "exported"
    with pytest.raises(HubError, match="the Hub fails with 500"):
        next(sweep)
    repository = hub.repositories["ada/model"]
    assert repository.private
    assert states(export_all(running, push_to_hub="model")) == {10: "there", 20: "exported", 30: "exported"}
    assert set(repository.branches) == {"main", "iter_0000010", "iter_0000020", "iter_0000030"}
    assert set(repository.at("main").files) == {".gitattributes"}
    for step in (10, 20, 30):
        commit = repository.at(f"iter_{step:07d}")
        assert commit.title == f"Export of iteration {step}"
        assert f'revision="iter_{step:07d}"'.encode() in commit.files["README.md"].content
    assert not (running / "hf").exists()
    assert sum("whoami" in request for request in hub.requests) <= 3


def test_directories_and_branches(hub: Hub, running: Path, tmp_path: Path) -> None:
    """With a destination both are kept, and what is in the one is not exported again for the other."""
    assert states(export_all(running, tmp_path / "out")) == dict.fromkeys([10, 20, 30], "exported")
    made = {path.name: identity(path) for path in (tmp_path / "out").iterdir()}
    messages = list(export_all(running, tmp_path / "out", push_to_hub="ada/model"))
    assert [(each.state, each.export) for each in messages] == [("exported", None)] * 3
    assert {path.name: identity(path) for path in (tmp_path / "out").iterdir()} == made
    card = (tmp_path / "out" / "iter_0000010" / "README.md").read_bytes()
    assert hub.repositories["ada/model"].at("iter_0000010").files["README.md"].content == card


def test_a_watch_outlives_a_hub_that_is_away(hub: Hub, running: Path) -> None:
    hub.faults.append(Fault("POST .*/commit/iter_0000020", 503, times=3))
    messages = states(export_all(running, push_to_hub="model", watch=True, until=30))
    assert list(messages.items()) == [(10, "exported"), (30, "exported"), (20, "exported")]


def test_options_are_those_of_an_export(running: Path) -> None:
    (messages, *_) = export_all(running, dtype="bfloat16")
    assert messages.export is not None
    assert messages.export.as_dict()["dtypes"] == ["bfloat16"]
    with pytest.raises(TypeError, match="unexpected keyword"):
        list(export_all(running, colour="red"))  # type: ignore[call-arg]
    with pytest.raises(ConvertError, match="no dtype"):
        list(export_all(running, running / "elsewhere", dtype="int8"))
