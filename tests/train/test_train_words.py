"""Messages of training where users stumble: the last line under torchrun, a missing extra or login, a finished run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mcore_convert.errors import ConfigError, DataError
from tests.kinds import ROOT
from tests.ranks import run_ranks
from tests.report_steps import config_of
from tests.unit.test_flops import GPT2
from train_entry import load_config
from train_entry.__main__ import main
from train_entry.data.chunks import JsonLines
from train_entry.pretrain import pretrain
from train_entry.report.report import Report

SMALL = ["model.num_layers=1", "logging.tensorboard=false", "logging.plot=false", "training.seq_length=32"]


def started(folder: Path, *words: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """Start two ranks by torchrun; `before` is Python that each process runs first."""
    (folder / "site").mkdir(exist_ok=True)
    (folder / "site" / "sitecustomize.py").write_text(before)
    paths = [str(folder / "site"), str(folder), os.environ.get("PYTHONPATH", ""), str(ROOT)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    return subprocess.run(
        [*command, "train_entry", *words], capture_output=True, text=True, timeout=180, env=environment, cwd=folder
    )


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    """Return what torchrun's report ends with."""
    *_, line, border = done.stderr.strip().splitlines()
    assert set(border) == {"="}
    return line.strip().removeprefix("traceback : ")


def test_a_refusal_ends_torchruns_report_in_one_line(tmp_path: Path) -> None:
    """With several reasons and a hint, once, and from one rank."""
    done = started(tmp_path, "tiny-gpt2", "optimzer.lr=1", "training.stepz=2")
    assert done.returncode == 1
    assert last_line(done).startswith("error: 2 problems in the configuration `tiny-gpt2`: there is no `optimzer.lr`")
    assert last_line(done).endswith("shows ready runs and the choices of each group)")
    assert done.stderr.count("error: 2 problems") == 2, "once in full, once at the end"


def test_without_the_extra(tmp_path: Path) -> None:
    """Where none of its packages can be imported."""
    hidden = (
        "import sys\n"
        "class Hidden:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('hydra', 'omegaconf', 'pydantic', 'yaml'):\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "    find_module = None\n"
        "from importlib import util\n"
        "real = util.find_spec\n"
        "util.find_spec = lambda name, package=None: (\n"
        "    None if name in ('hydra', 'omegaconf', 'pydantic', 'yaml') else real(name, package))\n"
        "if 'train_entry' in sys.orig_argv[-2:]:\n"
        "    sys.meta_path.insert(0, Hidden())\n"
    )
    done = started(tmp_path, "tiny-gpt2", before=hidden)
    expected = "error: training needs `hydra`, `omegaconf`, `pydantic`, `yaml`"
    assert done.returncode == 1
    assert last_line(done) == f"{expected} (hint: pip install 'mcore-convert[train]')"
    assert done.stderr.startswith(f"{expected}\nhint: pip install 'mcore-convert[train]'\n")


FLOW = """
from train_entry.flows import Pretraining

class Broken(Pretraining):
    def forward(self, model, batch):
        raise TypeError("a flow of one's own")
"""


def test_a_bug_is_neither_a_refusal_nor_usage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken_flow.py").write_text(FLOW)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    words = [*SMALL, f"run_dir={tmp_path}/run", "checkpoint=none"]
    assert main(["tiny-gpt2", *words, "training.flow=broken_flow:Broken"]) == 3
    text = capsys.readouterr().err
    assert "in forward" in text
    assert text.splitlines()[-1] == "error: TypeError: a flow of one's own"
    assert json.loads((tmp_path / "error.json").read_text())["message"]["message"] == text.splitlines()[-1]
    assert main([]) == 2
    assert main(["tiny-gpt2", "lr=1"]) == 1


def test_wandb_without_a_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wandb.py").write_text(
        "def init(**options):\n    raise RuntimeError('api_key not configured (no-tty). call wandb.login()')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(ConfigError) as refused:
        Report(config_of(tmp_path, wandb=True), GPT2)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    assert "Weights & Biases does not start (`logging.wandb`): api_key not configured" in str(refused.value)
    assert "WANDB_MODE=offline" in str(refused.value)


def test_a_finished_run_says_that_it_is_finished(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = load_config("tiny-gpt2", [*SMALL, f"run_dir={tmp_path}/run", "training.steps=2"])
    run_ranks(1, pretrain, config)
    assert "finished already" not in capfd.readouterr().err
    run_ranks(1, pretrain, config)
    text = capfd.readouterr().err
    path = tmp_path / "run" / "checkpoints" / "iter_0000002"
    assert f"finished already: {path} is of step 2 of 2; training.steps=4 would go on\n" in text
    assert "goes on from" not in text
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert len(rows) == 2


def test_a_fault_of_many_rows_is_reported_once() -> None:
    lines = [json.dumps({"body": f"text {n}"} if n not in (4, 9) else {"text": 5}) for n in range(1, 21)]
    chunk = JsonLines("a.jsonl", 1, 0, "\n".join(lines).encode())
    with pytest.raises(DataError) as refused:
        list(chunk.documents(["text"]))
    assert refused.value.items == (
        'a.jsonl:1: no `text` among its keys (body): {"body": "text 1"} (and lines 2-3, 5-8, 10-20)',
        'a.jsonl:4: `text` is a int, not text: {"text": 5} (and line 9)',
    )
