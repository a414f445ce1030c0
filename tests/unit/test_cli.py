"""The command line: what goes to stdout and stderr, exit codes, help."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mcore_convert import cli
from tests.conftest import HfMaker


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of one command."""
    capsys.readouterr()
    argv, sys.argv = sys.argv, ["mcore-convert", *map(str, arguments)]
    try:
        with pytest.raises(SystemExit) as exit_:
            cli.main()
    finally:
        sys.argv = argv
    code = exit_.value.code
    captured = capsys.readouterr()
    return (code if isinstance(code, int) else 0), captured.out, captured.err


COMMANDS = ["convert", "export", "push", "verify", "inspect", "families", "train"]


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS), ["data", "prepare"]])
def test_help(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, *command, "--help")
    assert code == 0
    assert "Usage: mcore-convert" in out
    if command:
        assert f"Example: mcore-convert {command[0]}" in " ".join(out.split())


def test_convert_and_verify(capsys: pytest.CaptureFixture[str], hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    source, out_dir = hf_checkpoint("llama-gqa"), tmp_path / "out"
    code, out, err = run(capsys, "convert", source, out_dir, "--tp", "2")
    assert code == 0
    assert out.splitlines()[0].startswith("llama  ")
    assert "--tensor-model-parallel-size 2" in out
    command = (out_dir / "megatron_args.txt").read_text().strip()
    assert command in out
    assert command.endswith(f"--load {out_dir}")
    assert err.splitlines() == ["note: the vocabulary of 421 is padded to 512 rows for tp = 2"]
    code, out, err = run(capsys, "verify", source, out_dir)
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == "equal"


def test_json_is_all_there_is_on_stdout(
    capsys: pytest.CaptureFixture[str], hf_checkpoint: HfMaker, tmp_path: Path
) -> None:
    source = hf_checkpoint("gpt2")
    code, out, _ = run(capsys, "convert", source, tmp_path / "out", "--json")
    facts = json.loads(out)
    assert code == 0
    assert facts["family"] == "gpt2"
    assert facts["source"]["format"] == "hf"
    _, out, _ = run(capsys, "inspect", tmp_path / "out", "--json")
    assert json.loads(out)["num_parameters"] == facts["num_parameters"]
    _, out, _ = run(capsys, "verify", source, tmp_path / "out", "--json")
    assert json.loads(out)["equal"] is True
    _, out, _ = run(capsys, "families", "--json")
    assert set(json.loads(out)) >= {"gpt2", "llama"}


def test_dry_run_writes_nothing(capsys: pytest.CaptureFixture[str], hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    code, out, _ = run(capsys, "convert", hf_checkpoint("gpt2"), tmp_path / "out", "--dry-run")
    assert code == 0
    assert "nothing written" in out
    assert "memory at most" in out
    assert list(tmp_path.iterdir()) == []


def test_a_refusal_and_a_difference_exit_with_1(
    capsys: pytest.CaptureFixture[str], hf_checkpoint: HfMaker, tmp_path: Path
) -> None:
    source = hf_checkpoint("llama-gqa")
    code, out, err = run(capsys, "convert", source, tmp_path / "out", "--tp", "3")
    assert (code, out) == (1, "")
    assert err.splitlines()[0] == "error: the model does not fit this layout"
    assert err.splitlines()[-1] == "hint: tp can be 1, 2, 4, 8 for this model; pp must divide its 4 layers"
    code, out, _ = run(capsys, "verify", source, hf_checkpoint("llama-gqa", dtype="bfloat16"))
    assert code == 1
    assert out.splitlines()[-1] == "different"


@pytest.mark.parametrize(
    "arguments",
    [["nothing"], ["convert", "a"], ["convert", "a", "b", "--max-shard-size", "big"], ["convert", "--tp", "0"]],
)
def test_wrong_usage_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert "Error" in err


def test_sizes(capsys: pytest.CaptureFixture[str], hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    code, out, _ = run(
        capsys, "convert", hf_checkpoint("gpt2"), tmp_path / "out", "--to", "hf", "--max-shard-size", "200KB", "--json"
    )
    assert code == 0
    assert len(json.loads(out)["target"]["files"]) > 1


def test_families_shows_the_rows(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "families", "llama")
    assert code == 0
    first = out.splitlines()[0].split()
    assert first == ["vocab", "embedding.word_embeddings.weight", "vocab", "hidden", "model.embed_tokens.weight"]
    assert "gated_column  decoder.layers.{layer}.mlp.linear_fc1.weight" in out


@pytest.mark.slow
def test_the_module_is_a_command(hf_checkpoint: HfMaker) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mcore_convert", "inspect", str(hf_checkpoint("gpt2"))],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "family      gpt2" in done.stdout
    assert done.stderr == ""


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "gbk", "utf-8"])
def test_a_name_that_the_terminal_cannot_show_is_escaped(encoding: str, hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    """A conversion that was done ended as a bug, since its summary could not be written."""
    words = ["convert", str(hf_checkpoint("gpt2")), str(tmp_path / "ün-日本")]
    done = subprocess.run(
        [sys.executable, "-m", "mcore_convert", *words],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": encoding},
        timeout=60,
        check=True,
    )
    shown = str(tmp_path / "ün-日本").encode(encoding, "backslashreplace")
    assert shown in done.stdout
    assert (tmp_path / "ün-日本" / "release" / ".metadata").is_file()
