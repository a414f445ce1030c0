"""Runs a function on several gloo ranks, forked from this process so that Megatron Core is imported once."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, NoReturn


@dataclass(frozen=True)
class Child:
    """One rank: a forked process, and the pipe on which it answers."""

    rank: int
    process: int
    pipe: Connection

    def end(self) -> None:
        """End the process, which may still be running, and collect it."""
        self.pipe.close()
        os.kill(self.process, signal.SIGKILL)  # a child not yet collected keeps its id, so this meets nobody else
        os.waitpid(self.process, 0)


class RankError(AssertionError):
    """What went wrong on a rank, with its traceback, or that the ranks took too long."""


def run_ranks(count: int, function: Callable[..., Any], *args: Any, timeout: float = 120) -> list[Any]:
    """What `function(*args)` returns on each of `count` ranks of an initialised gloo group, in the order of the ranks.

    The function and its arguments need no pickling; what it returns does.

    Raises:
        RankError: a rank raised, ended early, or was not done within `timeout` seconds. No process outlives the call.
    """
    import torch

    from mcore_convert.megatron.cpu import import_megatron

    import_megatron()
    gc.collect()  # what is garbage here must not be collected in a rank: a freed gloo group misses its threads there
    gc.freeze()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # forking with OpenMP's threads running would leave the ranks waiting for them
    children: list[Child] = []
    try:
        with tempfile.TemporaryDirectory() as scratch:
            for rank in range(count):
                ours, theirs = Pipe(duplex=False)
                process = os.fork()
                if process == 0:
                    _run_and_exit(Path(scratch) / "store", rank, count, function, args, theirs)
                theirs.close()
                children.append(Child(rank, process, ours))
            return _collect(children, time.monotonic() + timeout)
    finally:
        torch.set_num_threads(threads)
        gc.unfreeze()
        for child in children:
            child.end()


def _run_and_exit(
    path: Path, rank: int, count: int, function: Callable[..., Any], args: tuple[Any, ...], pipe: Connection
) -> NoReturn:
    """The life of a rank. It never returns into pytest, and skips what pytest registered to run at exit."""
    import torch.distributed as dist

    try:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # Megatron Core warns without it, also where there is no CUDA
        dist.init_process_group("gloo", store=dist.FileStore(str(path), count), rank=rank, world_size=count)
        answer = ("", pickle.dumps(function(*args)))
        dist.barrier()  # a rank that left early would break its peers' last messages
    except BaseException:  # torch's CheckpointException is no Exception
        answer = (traceback.format_exc(), b"")
    pipe.send(answer)
    os._exit(0)


def _collect(children: list[Child], deadline: float) -> list[Any]:
    answers: dict[int, Any] = {}
    while len(answers) < len(children):
        waiting = [child for child in children if child.rank not in answers]
        ready = wait([child.pipe for child in waiting], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankError(f"ranks {[child.rank for child in waiting]} of {len(children)} were not done in time")
        for child in waiting:
            if child.pipe not in ready:
                continue
            try:
                failure, answer = child.pipe.recv()
            except EOFError:
                failure, answer = "it ended without a word\n", b""
            if failure:
                raise RankError(f"rank {child.rank} of {len(children)} failed:\n{failure}")
            answers[child.rank] = pickle.loads(answer)
    return [answers[child.rank] for child in children]
