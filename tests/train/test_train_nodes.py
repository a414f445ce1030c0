"""Two nodes: two torchrun agents that find each other by a rendezvous, each with two of the four ranks of TP2 x PP2.

Where this test may make them, the nodes are two network namespaces that see each other over one cable only.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.ranks import run_ranks
from tests.warm import environment
from train_entry.config.compose import load_config
from train_entry.pretrain import pretrain

WORDS = (
    "training.steps=6",
    "training.seq_length=64",
    "training.global_batch_size=4",
    "logging.tensorboard=false",
    "logging.plot=false",
    "checkpoint.save=false",
)
SECONDS = 240


@dataclass(frozen=True)
class Node:
    """How a command is run on a node, its address, and its network interface."""

    prefix: tuple[str, ...]
    address: str
    interface: str


@contextlib.contextmanager
def nodes() -> Iterator[tuple[Node, Node]]:
    """Two hosts in network namespaces, or this one twice."""
    name = f"mc{os.getpid()}"
    names = (f"{name}a", f"{name}b")
    if not may_make_namespaces(names):
        yield (Node((), "127.0.0.1", "lo"), Node((), "127.0.0.1", "lo"))
        return
    result = tuple(Node(("ip", "netns", "exec", each), f"10.77.0.{n + 1}", each) for n, each in enumerate(names))
    try:
        ip("link", "add", names[0], "netns", names[0], "type", "veth", "peer", "name", names[1], "netns", names[1])
        for node in result:
            ip("-n", node.interface, "addr", "add", f"{node.address}/24", "dev", node.interface)
            ip("-n", node.interface, "link", "set", node.interface, "up")
            ip("-n", node.interface, "link", "set", "lo", "up")
        yield result[0], result[1]
    finally:
        for each in names:
            ip("netns", "del", each)


def may_make_namespaces(names: Sequence[str]) -> bool:
    made: list[str] = []
    for each in names:
        if shutil.which("ip") and subprocess.run(["ip", "netns", "add", each], capture_output=True).returncode == 0:
            made.append(each)
    works = len(made) == len(names) and not subprocess.run(["ip", "netns", "exec", names[0], "true"]).returncode
    if not works:
        for each in made:
            ip("netns", "del", each)
    return works


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port: int = server.getsockname()[1]
        return port


def losses(run_dir: Path) -> list[float]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows]


def test_two_nodes_follow_the_curve_of_one_rank(warm: Path, tmp_path: Path) -> None:
    alone, together = tmp_path / "alone", tmp_path / "together"
    run_ranks(1, pretrain, load_config("tiny-gpt2", [*WORDS, f"run_dir={alone}"]))
    port = free_port()
    with nodes() as pair, contextlib.ExitStack() as processes:
        agents = []
        for number, node in enumerate(pair):
            command = [
                *(*node.prefix, str(warm / "torchrun")),
                *("--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-id", "test"),
                *("--rdzv-endpoint", f"{pair[0].address}:{port}", "--local-addr", node.address),
                *("--rdzv-conf", f"is_host={number == 0}"),
                *("-m", "train_entry", "tiny-gpt2", "parallel=tp2-pp2", *WORDS, f"run_dir={together}"),
            ]
            variables = {**environment(warm), "GLOO_SOCKET_IFNAME": node.interface, "OMP_NUM_THREADS": "1"}
            log = processes.enter_context((tmp_path / f"node{number}.log").open("w"))
            agents.append(subprocess.Popen(command, env=variables, stdout=log, stderr=log, start_new_session=True))
        try:
            codes = [agent.wait(SECONDS) for agent in agents]
        finally:
            for agent in agents:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(agent.pid, 9)
                agent.wait()
    messages = "\n".join((tmp_path / f"node{number}.log").read_text() for number in range(2))
    assert codes == [0, 0], messages
    assert losses(together) == pytest.approx(losses(alone), abs=1e-5)
    assert len(losses(alone)) == 6
