"""Conventions of the terminal: help in groups, completion, exit codes, errors as JSON, logs, reports."""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from mcore_convert import cli
from mcore_convert.cli.options import PANELS
from mcore_convert.version import VERSION
from tests.conftest import HfMaker
from tests.kinds import ROOT
from tests.unit.test_cli import run

GROUP: Any = get_command(cli.app)
COMMANDS: dict[str, Any] = {**GROUP.commands, "data prepare": GROUP.commands["data"].commands["prepare"]}
COMMANDS.pop("data")
ERROR = {"kind", "message", "items", "hint"}


def error_of(out: str) -> dict[str, Any]:
    """Return the one error that stdout has."""
    result = json.loads(out)
    assert set(result) == {"error"}
    assert set(result["error"]) == ERROR
    error: dict[str, Any] = result["error"]
    return error


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version") == (0, f"mcore-convert {VERSION}\n", "")


def test_commands_are_grouped_and_no_sentence_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "--help")
    assert re.findall(r"^(\S.*):$", out, re.M) == ["Move checkpoints", "Compare and inspect", "Train", "Options"]
    assert "..." not in out.replace("[ARGS]...", "")
    whole = " ".join(out.split())
    for name, command in GROUP.commands.items():
        first = " ".join(command.help.split("\n\n")[0].split())
        assert f" {name} {first.partition('. ')[0].rstrip('.')}." in whole


@pytest.mark.parametrize("name", COMMANDS)
def test_options_are_in_panels(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every option is in one section of the help, and what all commands take is there with all."""
    _, out, _ = run(capsys, *name.split(), "--help")
    sections = re.split(r"^(\S.*):$", out, flags=re.M)
    headings = sections[1::2]
    assert headings == [each for each in ("Arguments", "Options", *PANELS) if each in headings]
    last = sections[-1]
    for option in ("--json", "--verbose", "--log-level", "--help"):
        assert option in last, option
    for param in COMMANDS[name].params:
        if param.param_type_name == "option":
            assert len(re.findall(rf"^  (?:-\w, )?{param.opts[0]}(?![\w-])", out, re.M)) == 1, param.opts


@pytest.mark.slow
def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv[1:] = ['convert', '--help']\nfrom mcore_convert.cli import main\ntry: main()\nfinally: "
    )
    code += "assert not {'torch', 'numpy', 'rich', 'tqdm', 'huggingface_hub', 'yaml'} & {*sys.modules}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def completed(*words: str) -> set[str]:
    """Return what bash completes when a user presses the tab key after these words."""
    line = " ".join(["mcore-convert", *words])
    settings = {"_MCORE_CONVERT_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words))}
    done = subprocess.run(
        [sys.executable, "-m", "mcore_convert"],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr == ""
    return set(done.stdout.split())


@pytest.mark.slow
def test_completion() -> None:
    assert completed("ver") == {"verify"}
    assert completed("families", "ll") == {"llama"}
    assert completed("convert", "a", "b", "--family", "") >= {"gpt2", "llama"}
    assert completed("convert", "a", "b", "--to", "torch") == {"torch", "torch_dist"}
    assert completed("train", "tiny-") == {"tiny-gpt2", "tiny-llama"}
    assert completed("train", "tiny-gpt2", "training.st") == {"training.steps="}


@pytest.mark.slow
def test_completion_is_shown_for_a_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mcore_convert", "--show-completion"],
        env={**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "--show-completion" in done.stderr  # without detection it wants the shell's name
    done = subprocess.run(
        [sys.executable, "-m", "mcore_convert", "--show-completion", "bash"],
        env={**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "_MCORE_CONVERT_COMPLETE=complete_bash" in done.stdout


@pytest.mark.parametrize("command", ["verify", "diff"])
def test_the_codes_of_diff(command: str, capsys: pytest.CaptureFixture[str], hf_checkpoint: HfMaker) -> None:
    a, b, other = (
        hf_checkpoint(name, fill="normal", seed=seed)
        for name, seed in (("llama-gqa", 0), ("llama-gqa", 1), ("gpt2", 0))
    )
    assert run(capsys, command, a, a, "--quiet") == (0, "", "")
    assert run(capsys, command, a, b, "--quiet") == (1, "", "")
    code, out, err = run(capsys, command, a, other)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert run(capsys, command, a, "./nowhere")[0] == 2
    assert run(capsys, command, a)[0] == 2


@pytest.mark.parametrize(
    ("arguments", "code", "kind"),
    [
        (["convert", "SRC", "DST", "--tp", "3"], 1, "LayoutError"),
        (["reshard", "./nowhere", "DST"], 1, "UnreadableCheckpoint"),
        (["export", "./nowhere"], 1, "UnreadableCheckpoint"),
        (["push", "./nowhere", "a/b"], 1, "UnreadableCheckpoint"),
        (["verify", "SRC", "./nowhere"], 2, "UnreadableCheckpoint"),
        (["diff", "SRC", "./nowhere"], 2, "UnreadableCheckpoint"),
        (["inspect", "./nowhere"], 1, "UnreadableCheckpoint"),
        (["families", "nobody"], 1, "ConfigError"),
        (["train", "nowhere.yaml", "--dry-run"], 1, "ConfigError"),
        (["data", "prepare", "./nowhere", "out", "--tokenizer", "./nowhere"], 1, "DataError"),
        (["convert", "SRC"], 2, "UsageError"),
        (["convert", "SRC", "DST", "--tp", "0"], 2, "UsageError"),
        (["verify", "SRC", "SRC", "--nothing"], 2, "UsageError"),
        (["train", "tiny-gpt2"], 2, "UsageError"),
        (["nothing"], 2, "UsageError"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_errors_are_json_too(
    arguments: list[str],
    code: int,
    kind: str,
    capsys: pytest.CaptureFixture[str],
    hf_checkpoint: HfMaker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("SRC").symlink_to(hf_checkpoint("llama-gqa"))
    ended, out, err = run(capsys, *arguments, "--json")
    error = error_of(out)
    assert (ended, error["kind"]) == (code, kind)
    assert error["message"] in err
    assert {path.name for path in tmp_path.iterdir()} == {"SRC"}


def test_no_item_is_left_out_of_json(
    capsys: pytest.CaptureFixture[str], hf_checkpoint: HfMaker, tmp_path: Path
) -> None:
    """A terminal shows some of many culprits, a program gets all."""
    from safetensors.torch import load_file, save_file

    path = hf_checkpoint("gpt2")
    (tmp_path / "SRC").mkdir()
    (tmp_path / "SRC" / "config.json").write_bytes((path / "config.json").read_bytes())
    tensors = load_file(path / "model.safetensors")
    extra = {f"odd.{'x' * number}": tensors[min(tensors)].clone() for number in range(1, 31)}
    save_file({**tensors, **extra}, tmp_path / "SRC" / "model.safetensors", {"format": "pt"})
    code, out, err = run(capsys, "convert", tmp_path / "SRC", tmp_path / "DST", "--json")
    assert code == 1
    assert len([item for item in error_of(out)["items"] if "odd." in item]) == 30
    assert "more" in err


def test_json_of_train(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "train", "--list", "--json")
    listed = json.loads(out)
    assert code == 0
    assert "tiny-gpt2" in listed["runs"]
    assert "tp2" in listed["groups"]["parallel"]
    code, out, _ = run(capsys, "train", "tiny-gpt2", "parallel=tp2", "--print-config", "--json")
    assert (code, json.loads(out)["parallel"]["tp"]) == (0, 2)


def test_a_bug_is_a_line_and_a_report(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*_: object, **__: object) -> None:
        raise KeyError("decoder.final_layernorm.weight")

    monkeypatch.setattr("mcore_convert.api.convert", breaks)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code, out, err = run(capsys, "convert", "./a b", "c", "--json")
    (report,) = tmp_path.iterdir()
    first, second = err.splitlines()
    assert code == 3
    assert first == f"error: unexpected KeyError: 'decoder.final_layernorm.weight'; the report is in {report}"
    assert second.startswith("hint: a bug of mcore-convert")
    text = report.read_text()
    assert "$ mcore-convert convert './a b' c --json" in text
    assert text.splitlines()[-1] == "KeyError: 'decoder.final_layernorm.weight'"
    assert 'raise KeyError("decoder.final_layernorm.weight")' in text
    error = error_of(out)
    assert (error["kind"], error["items"]) == ("KeyError", [f"the report is in {report}"])
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    code, _, err = run(capsys, "convert", "a", "c")
    assert code == 3
    assert "Traceback (most recent call last)" in err  # no file can be written: it goes nowhere else


def test_what_the_system_refuses_is_no_bug(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "/closed/page")

    monkeypatch.setattr("mcore_convert.api.inspect", refuses)
    assert run(capsys, "inspect", "a") == (1, "", "error: `/closed/page`: Permission denied\n")


def test_levels_of_the_log(capsys: pytest.CaptureFixture[str], hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    source = hf_checkpoint("gpt2")

    def logged(*options: str) -> str:
        code, out, err = run(capsys, "convert", source, tmp_path / "DST", "--quiet", "--overwrite", *options)
        assert (code, out) == (0, "")
        return err

    assert logged() == ""
    phases = logged("-v")
    assert re.search(r"^\d\d:\d\d:\d\d\.\d{3} INFO planning: \d+\.\d\d s$", phases, re.M)
    assert re.search(r"INFO copying: \d+\.\d\d s, .*B/s$", phases, re.M)
    assert re.search(rf"INFO opened `{source}`: hf, 52 tensors$", phases, re.M)
    assert re.search(r"INFO planned \d+ copies of \S+ \S+ into \d+ files", phases)
    assert "DEBUG" not in phases
    files = logged("--log-level", "DEBUG")
    assert re.search(rf"DEBUG opened {source}/model.safetensors", files)
    assert re.sub(r"\d+\.\d+|\d\d:", "", files).count("INFO") == phases.count("INFO")
    assert logged("--log-level", "warning") == ""
    assert logging.getLogger("mcore_convert").handlers == []  # one command does not log for the next


def test_the_command_is_called_as_the_package_is() -> None:
    """`uvx NAME` and `pipx run NAME` run the script of the package's own name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["scripts"][project["name"]].partition(":")
    assert (module, name) == ("mcore_convert.__main__", "main")
    assert callable(getattr(importlib.import_module(module), name))
    assert project["dynamic"] == ["version"]  # hatch reads it from the module
