"""The real client of the Hub, pointed at a Hub on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from huggingface_hub import constants

from fixtures.hub import Hub, Token, running_hub

ROOT = Path(__file__).parents[1]


@contextmanager
def client_of_a_hub(home: Path) -> Iterator[Hub]:
    """A Hub that the client in this process talks to, as `ada`; what would wait before it tries again does not."""
    with pytest.MonkeyPatch.context() as patch, running_hub() as hub:
        hub.tokens["hf_ada"] = Token("ada")
        patch.setattr(constants, "ENDPOINT", hub.url)
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        patch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
        patch.setenv("HF_TOKEN", "hf_ada")
        patch.setattr(time, "sleep", lambda seconds: None)
        yield hub


def started_with(hub: Hub, home: Path, *command: str | Path) -> subprocess.Popen[str]:
    """Return a Python process whose client talks to a Hub, from its start on."""
    environment = os.environ | {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home),
        "HF_TOKEN": "hf_ada",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "PYTHONPATH": str(ROOT),
    }
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, *map(str, command)], env=environment, stdout=pipe, stderr=pipe, text=True)


def run_with(hub: Hub, home: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    """Such a process, run to its end."""
    process = started_with(hub, home, *command)
    out, err = process.communicate(timeout=120)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)
