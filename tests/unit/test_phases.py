"""Progress names what is being done, from the beginning to the end; on a terminal, and to callers from Python."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mcore_convert import convert, diff, export, inspect, push, reshard, verify
from mcore_convert.cli import terminal
from tests.conftest import HfMaker
from tests.hub import client_of_a_hub


class Recorder:
    """What a progress was told: phases in their order, and the last bytes of each that has any."""

    def __init__(self) -> None:
        self.phases: list[str] = []
        self.bytes: dict[str, tuple[int, int]] = {}
        self.now: str | None = None

    def __call__(self, done: int, total: int) -> None:
        assert self.now is not None, "bytes without a phase"
        self.bytes[self.now] = (done, total)

    def phase(self, name: str | None) -> None:
        assert (name is None) != (self.now is None), "a phase ends before the next begins"
        self.now = name
        if name is not None:
            self.phases.append(name)


@pytest.fixture(scope="module")
def pair(hf_checkpoint: HfMaker, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and the same in Megatron's format."""
    source, dist = hf_checkpoint("llama-gqa", fill="normal"), tmp_path_factory.mktemp("phases") / "dist"
    convert(source, dist, tp=2)
    return source, dist


CONVERT = ["opening", "planning", "checking", "copying", "finishing"]


def test_phases_of_conversions(pair: tuple[Path, Path], tmp_path: Path) -> None:
    source, dist = pair
    recorder = Recorder()
    done = convert(source, tmp_path / "dist", progress=recorder)
    assert recorder.phases == CONVERT
    assert recorder.bytes == {"copying": (done.plan.nbytes, done.plan.nbytes)}
    recorder = Recorder()
    reshard(dist, tmp_path / "ranks", to="torch", tp=2, progress=recorder)
    assert recorder.phases == CONVERT
    recorder = Recorder()
    convert(source, tmp_path / "none", dry_run=True, progress=recorder)
    assert recorder.phases == CONVERT[:2]
    recorder = Recorder()
    export(dist, tmp_path / "hf", progress=recorder)
    assert recorder.phases == ["planning", "checking", "copying", "reading again", "finishing"]
    (copied, total), (read, same) = recorder.bytes["copying"], recorder.bytes["reading again"]
    assert 0 < copied < read == total == same


def test_phases_of_inspections(pair: tuple[Path, Path], tmp_path: Path) -> None:
    source, dist = pair
    recorder = Recorder()
    inspect(dist, stats=True, html=tmp_path / "page.html", progress=recorder)
    assert recorder.phases == ["opening", "measuring", "writing the page"]
    recorder = Recorder()
    diff(source, dist, progress=recorder)
    assert recorder.phases == ["opening", "comparing"]
    assert recorder.bytes["comparing"][0] == recorder.bytes["comparing"][1] > 0


def test_phases_of_logits(pair: tuple[Path, Path]) -> None:
    source, dist = pair
    recorder = Recorder()
    assert verify(source, dist, logits=True, progress=recorder).equal
    release = dist / "release"
    assert recorder.phases == [
        "opening",
        "checking",
        "comparing",
        "importing torch",
        f"building the model of {source}",
        f"computing the logits of {source}",
        "importing Megatron Core",
        f"building the model of {release}",
        f"computing the logits of {release}",
    ]


def test_phases_of_an_upload(pair: tuple[Path, Path], tmp_path: Path) -> None:
    recorder = Recorder()
    with client_of_a_hub(tmp_path):
        push(pair[0], "ada/model", progress=recorder)
    assert recorder.phases == ["asking the Hub", "asking the Hub", "hashing", "sending"]


def test_a_plain_function_is_a_progress(pair: tuple[Path, Path], tmp_path: Path) -> None:
    messages: list[tuple[int, int]] = []
    export(pair[1], tmp_path / "hf", progress=lambda done, total: messages.append((done, total)))
    assert messages[-1][0] == messages[-1][1]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    tty = Terminal()
    monkeypatch.setattr(sys, "stderr", tty)
    monkeypatch.setattr(terminal, "DRAW_EVERY", 0.01)
    monkeypatch.setenv("COLUMNS", "70")

    def drawn() -> str:
        """Return what is drawn once more from now on."""
        tty.seek(0)
        tty.truncate()
        end = time.monotonic() + 10
        while "\x1b[K" not in tty.getvalue() and time.monotonic() < end:
            time.sleep(0.005)
        return tty.getvalue()

    with terminal.progress() as bar:
        assert bar is not None
        bar.phase("planning\x1b")
        assert re.match(r"\rplanning\\x1b  0 s\x1b\[K", drawn())  # nothing of a name is obeyed
        bar.phase("copying")
        bar(10**6, 4 * 10**6)
        shown = drawn()
        assert re.match(r"\rcopying:  25%\|", shown)
        assert "1.00M/4.00M" in shown
        assert all(len(line) < 70 for line in shown.replace("\x1b[K", "").split("\r"))
        terminal.say("note: a line")
        assert "\r\x1b[Knote: a line\n" in tty.getvalue()
        bar.phase(None)
        tty.truncate(0)
        time.sleep(0.05)
        assert tty.getvalue() == ""
        bar.phase("hashing")
        drawn()
    assert tty.getvalue().endswith("\r\x1b[K")
    assert capsys.readouterr().out == ""
    with terminal.progress(quiet=True) as bar:
        assert bar is None


@pytest.mark.slow
def test_a_terminal_shows_phases_until_the_end(pair: tuple[Path, Path]) -> None:
    mine, theirs = pty.openpty()
    code = "import sys; from mcore_convert.cli import main, terminal; terminal.DRAW_EVERY = 1e-4; main(sys.argv[1:])"
    words = [sys.executable, "-c", code, "verify", *map(str, pair)]
    process = subprocess.Popen(words, stderr=theirs, stdout=subprocess.PIPE, text=True)
    os.close(theirs)
    seen = b""
    try:
        while chunk := os.read(mine, 65536):
            seen += chunk
    except OSError:  # the other end is closed
        pass
    finally:
        os.close(mine)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert out.splitlines()[-1] == "equal"
    assert "\r" not in out
    assert re.search(rb"\r(opening|checking|comparing)\b", seen)
    assert seen.endswith(b"\r\x1b[K")


@pytest.mark.slow
def test_nothing_is_shown_where_no_terminal_is(pair: tuple[Path, Path]) -> None:
    words = [sys.executable, "-m", "mcore_convert", "verify", *map(str, pair)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
