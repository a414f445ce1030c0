"""Wall time and anonymous memory of a command."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

# A tensor with a shorter life is not seen. Reading /proc of a process and its children takes about 0.1 ms.
POLL_SECONDS = 0.005

Command = Sequence[str | Path]

# An installed package has byte code; a checkout has it after its first run, unless this variable prevents it.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


class CommandFailed(Exception):
    """A measured command with an unexpected exit code; the text is its output on stderr."""


def seconds(command: Command, code: int = 0) -> float:
    """Return the wall time of a command that must exit with this code."""
    start = time.perf_counter()
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    )
    elapsed = time.perf_counter() - start
    if done.returncode != code:
        raise CommandFailed(f"{' '.join(map(str, command))}: exit {done.returncode}\n{done.stderr[-2000:]}")
    return elapsed


def peak_anonymous_bytes(command: Command, code: int = 0) -> int:
    """Return the most anonymous memory that a command and its children held together; it must exit with this code.

    Anonymous memory is what a process allocates. Pages of mapped files are not in it: the kernel drops them at need.
    """
    peak = 0
    with tempfile.TemporaryFile() as stderr:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr, env=ENVIRONMENT
        )
        while child.poll() is None:
            peak = max(peak, sum(map(_anonymous_bytes, _family_of(child.pid))))
            time.sleep(POLL_SECONDS)
        if child.returncode != code:
            stderr.seek(0)
            text = stderr.read().decode(errors="replace")[-2000:]
            raise CommandFailed(f"{' '.join(map(str, command))}: exit {child.returncode}\n{text}")
    return peak


def _family_of(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    family = [pid]
    for member in family:  # grows during the loop
        for task in Path(f"/proc/{member}/task").glob("*/children"):
            try:
                family += map(int, task.read_text().split())
            except OSError:  # the thread has ended
                continue
    return family


def _anonymous_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:  # the process has ended
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))
