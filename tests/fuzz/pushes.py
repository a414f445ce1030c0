"""Models sent to a Hub that fails: on it is the model of before or the new one, and what is said of it is so."""

from __future__ import annotations

import os
import random
import re
import signal
from collections.abc import Callable
from typing import ClassVar

from fixtures.hub import Fault, Hub
from fixtures.hub.store import File
from mcore_convert.cli.failures import BUG, DONE
from tests.fuzz.checkpoints import Case, Subject, alarm
from tests.hub import client_of_a_hub

REPO = "ada/model"
REQUESTS = (
    "GET .*/whoami-v2", "POST .*/create", "GET .*/refs", "GET .*/tree/.*", "POST .*/preupload/.*", "POST .*/batch",
    "PUT .*", "PUT .*", "POST .*/verify", "POST .*/commit/main", "POST .*/commit/main", "POST .*", ".*",
)  # fmt: skip
STATUSES = (400, 401, 403, 404, 409, 412, 429, 500, 502, 503, 504)
TIMES = (1, 1, 2, 5, 1000)
OF_THE_CLIENT = re.compile(r"^(.* thrown while requesting .*|Retrying in .*)\n", re.MULTILINE)
STARTS = ("error: ", "note: ", "warning: ", "interrupted; ")


class Pushes:
    """Commands that send a model while requests are refused, cut, answered in vain, or a signal comes."""

    names: ClassVar = ("pushes",)

    def __init__(self, name: str) -> None:
        self.name = name
        self._subject = Subject("hf_shards")

    def case(self, seed: int) -> Case:
        """Let some requests go wrong, as the seed says, then send the model to its end."""
        rng = random.Random(f"{self.name} {seed}")
        subject = self._subject
        before = {"config.json": b"{}", "model.safetensors": b"of before", "notes.txt": b"kept"}
        with subject.laid(subject.files) as source, alarm(), client_of_a_hub(subject.home) as hub:
            hub.part = rng.choice((10**9, 20_000))
            if is_new := rng.random() < 0.5:
                before = {}
            else:
                hub.create(REPO).add(
                    "main", "before", {name: File.regular(text) for name, text in before.items()}, None
                )
            sent = {**{name: text for name, text in before.items() if name == "notes.txt"}, **subject.files}
            hub.faults += [_fault(rng) for _ in range(rng.choice((1, 1, 2, 3)))]
            what = "; ".join(
                f"{each.pattern} {each.status or each.after} {each.late} {each.times}" for each in hub.faults
            )
            command = ("push", str(source), REPO, "--quiet", *rng.choice([(), ("--tag", "v1")]))
            code, messages = subject.run(command)
            what += f" {'new' if is_new else 'old'}: code {code}"
            there = _files(hub)
            if there != before and there != sent:
                return Case("LOOKS WHOLE AND IS NOT", what, messages)
            if "v1" in (hub.repositories[REPO].tags if REPO in hub.repositories else {}) and there != sent:
                return Case("TAG OF NOTHING", what, messages)
            if code == DONE and there != sent:
                return Case("WRONG WORD", what, messages)
            if code == BUG or (code != DONE and not OF_THE_CLIENT.sub("", messages).startswith(STARTS)):
                return Case("bug" if code == BUG else "wrong end", what, messages)
            hub.faults.clear()
            again, text = subject.run(command)
            if again != DONE or _files(hub) != sent:
                return Case("DOES NOT GO ON", what, messages + text)
            return Case("unchanged" if code == DONE else "refused", what, messages)


def _fault(rng: random.Random) -> Fault:
    pattern, times = rng.choice(REQUESTS), rng.choice(TIMES)
    stop: Callable[[], object] = lambda: os.kill(os.getpid(), signal.SIGINT)  # noqa: E731
    return rng.choice((
        Fault(pattern, rng.choice(STATUSES), "out of order", times=times),
        Fault(pattern, after=rng.choice((0, 10, 5000)), times=times),
        Fault(pattern, late=True, times=times),
        Fault(pattern, late=rng.random() < 0.5, then=stop),
    ))  # fmt: skip


def _files(hub: Hub) -> dict[str, bytes]:
    if REPO not in hub.repositories:
        return {}
    files = hub.repositories[REPO].at("main").files
    return {name: file.content for name, file in files.items() if name != ".gitattributes"}
