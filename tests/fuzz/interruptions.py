"""Conversions that end at a random moment, by a signal or a fault of the file system: whole, or absent and so said."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import ClassVar
from unittest import mock

from mcore_convert.cli.failures import BUG
from tests.faults import FAULTS, Fault, counted
from tests.fuzz.checkpoints import COMMANDS, GOOD, Case, Hung, Subject, alarm
from tests.refusals import tree

SUBJECTS = ("hf", "dist_state", "ranks_distributed", "fsdp")
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
STRANGERS = {"DST.partial.old/weights": b"of somebody else", "DST-2/weights": b"too"}
Tree = dict[str, bytes | str | None]
GONE = "nothing was left behind"


class Interruptions:
    """Commands over the corpus, each of which ends before its time: by a signal, or because a call to `os` fails."""

    names: ClassVar = ("kills", "faults")

    def __init__(self, name: str) -> None:
        self.name = name
        self._subjects = [Subject(each) for each in SUBJECTS]
        self._whole: dict[tuple[str, tuple[str, ...]], tuple[Tree, Counter[str], float]] = {}  # what a command makes

    def case(self, seed: int) -> Case:
        """End a command at a moment that the seed chooses, then have it done to its end."""
        rng = random.Random(f"{self.name} {seed}")
        subject = rng.choice(self._subjects)
        command = rng.choice(COMMANDS[subject.name])
        with subject.laid(subject.files) as source, alarm():
            home = source.parent
            for name, content in STRANGERS.items():
                (home / name).parent.mkdir()
                (home / name).write_bytes(content)
            before = tree(home)
            if (subject.name, command) not in self._whole:
                with counted() as calls:
                    start = time.monotonic()
                    code, err = subject.run(command)
                    seconds = time.monotonic() - start
                assert code == 0, (command, err)
                self._whole[subject.name, command] = tree(home), calls, seconds
                shutil.rmtree(home / "DST")
            expected, calls, seconds = self._whole[subject.name, command]
            kind, what = (
                killed(rng, home, command, seconds) if self.name == "kills" else failed(rng, subject, command, calls)
            )
            what = f"{subject.name} {' '.join(command)}: {what}"
            after = tree(home)
            if {name: after.get(name) for name in before} != before:
                return Case("SOURCE OR STRANGER TOUCHED", what)
            if "DST" in after and {name: each for name, each in after.items() if name in expected} != expected:
                return Case("LOOKS WHOLE AND IS NOT", what)
            if kind not in GOOD or "DST" in after:
                return Case(kind, what)
            code, err = subject.run((*command, *rng.choice([(), ("--resume",)])))
            return Case(kind, what) if code == 0 and tree(home) == expected else Case("DOES NOT GO ON", what, err)


def killed(rng: random.Random, home: Path, command: tuple[str, ...], seconds: float) -> tuple[str, str]:
    """Send a process of its own a signal; what that was, and whether what it said of the destination is so."""
    number, moment = rng.choice(SIGNALS), rng.uniform(0, 1.2 * seconds)
    words = (*command, *rng.choice([(), ("--resume",)]))
    (home / "stderr").touch()
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS[2:])  # a child that is no command yet must not go on as this
    child = os.fork()
    if not child:
        _become(home, words)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS[2:])
    time.sleep(moment)
    os.kill(child, number)
    try:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    except Hung:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return "hang", f"{number.name} after {moment:.3f} s, {words[-1]}"
    err = (home / "stderr").read_text()
    (home / "stderr").unlink()
    left = {path.name for path in home.iterdir()} - {"SRC", *(name.partition("/")[0] for name in STRANGERS)}
    what = f"{number.name} after {moment:.3f} s, {words[-1]}: code {code}, left {sorted(left)}\n{err}"
    if code == -signal.SIGKILL or (code == -number and not left):  # or before the command could hear it
        return "refused", what
    if code == 0:
        return "unchanged" if left == {"DST"} else "leftover", what
    if code != 128 + number or "Traceback" in err:
        return "wrong end", what
    if (GONE in err) != (not left):
        return "WRONG WORD", what
    return "refused" if left <= {"DST"} or "--resume" in words else "leftover", what


def _become(home: Path, words: tuple[str, ...]) -> None:
    """Run a command in the place of this process."""
    os.dup2(os.open(home / "stderr", os.O_WRONLY), 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
    for number in SIGNALS[2:]:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS[2:])
    code = 70
    try:
        from mcore_convert.__main__ import main

        sys.argv = ["mcore-convert", *Subject.placed(home, words)]
        main()
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        os._exit(code)


def failed(rng: random.Random, subject: Subject, command: tuple[str, ...], calls: dict[str, int]) -> tuple[str, str]:
    """Have one call fail; which, and whether what is left is what was said."""
    function = rng.choice([name for name in FAULTS if calls[name]])
    fault = Fault(function, rng.randrange(calls[function]), rng.choice(FAULTS[function]))
    with mock.patch("mcore_convert.storage.threads.WORKERS", 1), counted(fault):
        code, err = subject.run(command)
    left = {path.name for path in subject.home.iterdir() if path.name not in ("SRC", "DST.partial.old", "DST-2")}
    what = f"{fault}: code {code}, left {sorted(left)}\n{err}"
    if code == 0:
        return "unchanged" if left == {"DST"} else "leftover", what
    if code == BUG:
        return "bug", what
    return "refused" if err.startswith(("error: ", "note: ", "warning: ")) and left <= {"DST"} else "leftover", what
