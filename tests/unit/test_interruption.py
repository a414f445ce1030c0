"""Signals at the moments at which it is easy to say something about the destination that is not so."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mcore_convert import verify
from tests.conftest import HfMaker

# Statements that run in the process of a command before it: each makes a signal come at one moment.
KILL = "import os, signal, pathlib, builtins; kill = lambda: os.kill(os.getpid(), signal.SIGINT)\n"
AFTER_THE_RENAME = """
rename = pathlib.Path.rename
def renamed(path, to):
    result = rename(path, to)
    if path.name.endswith('.partial'):
        kill()
    return result
pathlib.Path.rename = renamed
"""
AT_THE_LAST_LINE = """
from mcore_convert.cli import convert
show = convert.show if hasattr(convert, 'show') else convert.say
def shown(*words):
    kill()
    return show(*words)
for name in ('show', 'say'):
    if hasattr(convert, name):
        setattr(convert, name, shown)
"""
WHILE_IT_CLEANS_UP = """
import shutil
from mcore_convert.conversion import execute
remove = shutil.rmtree
def removed(*words, **options):
    kill()
    return remove(*words, **options)
shutil.rmtree = removed
def fill(*_):
    kill()
execute.fill = fill
"""
WHILE_IT_IMPORTS = """
real = builtins.__import__
def imported(name, *words, **options):
    if name == 'typer':
        kill()
    return real(name, *words, **options)
builtins.__import__ = imported
"""
WHEN_IT_IS_OVER = """
import atexit
atexit.register(kill)
"""


@pytest.fixture
def source(tmp_path: Path, hf_checkpoint: HfMaker) -> Path:
    made = hf_checkpoint("llama-gqa", tokenizer=False, config={"num_hidden_layers": 2})
    return Path(shutil.copytree(made, tmp_path / "SRC"))


def interrupted(source: Path, moment: str) -> tuple[int, str]:
    """Exit code and stderr of a conversion to `DST` that gets a signal."""
    code = f"{KILL}{moment}\nfrom mcore_convert.__main__ import main\nmain()"
    command = [sys.executable, "-c", code, "convert", "SRC", "DST"]
    ended = subprocess.run(command, cwd=source.parent, capture_output=True, text=True, timeout=120, check=False)
    return ended.returncode, ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("moment", [AFTER_THE_RENAME, AT_THE_LAST_LINE], ids=["after the rename", "at the last line"])
def test_what_is_finished_stands_and_is_reported(moment: str, source: Path, tmp_path: Path) -> None:
    code, err = interrupted(source, moment)
    assert (code, err.splitlines()[-1]) == (128 + signal.SIGINT, "interrupted; `DST` was finished, and stands")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["DST", "SRC"]
    assert verify(source, tmp_path / "DST").equal


@pytest.mark.slow
@pytest.mark.parametrize("moment", [WHILE_IT_CLEANS_UP, WHILE_IT_IMPORTS], ids=["while it cleans up", "in an import"])
def test_nothing_is_left(moment: str, source: Path, tmp_path: Path) -> None:
    assert interrupted(source, moment) == (128 + signal.SIGINT, "interrupted; nothing was left behind\n")
    assert [path.name for path in tmp_path.iterdir()] == ["SRC"]


@pytest.mark.slow
def test_when_it_is_over_a_signal_changes_nothing(source: Path, tmp_path: Path) -> None:
    code, err = interrupted(source, WHEN_IT_IS_OVER)
    assert (code, "interrupted" in err, "Traceback" in err) == (0, False, False)
    assert verify(source, tmp_path / "DST").equal
