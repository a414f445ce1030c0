"""Processes that share a conversion, as torchrun starts them: their parts, where they meet, and the first error.

They share the file system that holds the target, and talk through torch.distributed's store alone: no process group,
no CUDA. The first of them claims the destination, and gives it its name at the end.
"""

from __future__ import annotations

import contextlib
import datetime
import heapq
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Protocol

from mcore_convert.errors import ConvertError
from mcore_convert.storage.deferral import Deferral
from mcore_convert.storage.progress import Meter
from mcore_convert.storage.threads import started

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what torchrun and its like set for each process
LOOK_EVERY = 0.05  # seconds
BEAT_EVERY = 1.0
SILENCE = 120.0  # seconds after which a process that says nothing is taken for dead
CONNECT = 120.0
LAST_WORD = 20.0  # seconds that a process that failed waits for the first one to tell of it


class Store(Protocol):
    """What is used of `torch.distributed.TCPStore`."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def add(self, key: str, value: int) -> int: ...
    def check(self, keys: list[str]) -> bool: ...
    def compare_set(self, key: str, expected: str, value: str) -> bytes: ...


class OtherRankError(ConvertError):
    """Another process has failed, and the first one tells of it."""


class Ranks:
    """This process among those that share a conversion; alone unless a store is given."""

    def __init__(self, rank: int = 0, size: int = 1, store: Store | None = None) -> None:
        self.rank, self.size, self._store = rank, size, store
        self._beats: dict[int, tuple[int, float]] = {}
        self._told = 0.0

    @property
    def is_first(self) -> bool:
        """Whether this is the process that claims the destination and speaks for all."""
        return self.rank == 0

    def part(self, sizes: Mapping[Path, int]) -> set[Path]:
        """Return the files of this process: the largest first, each to whoever has the fewest bytes;
        every rank agrees.
        """
        loads = [(0, rank) for rank in range(self.size)]  # a heap
        mine = set()
        for path, size in sorted(sizes.items(), key=lambda each: (-each[1], each[0])):
            load, rank = loads[0]
            heapq.heapreplace(loads, (load + size, rank))
            if rank == self.rank:
                mine.add(path)
        return mine

    def meet(self, place: str) -> None:
        """Wait until every process has come here.

        Raises:
            ConvertError: one of them has failed, or says nothing any more.
        """
        if self._store is None:
            return
        self._store.add(f"{place}/count", 1)
        self._wait(lambda store: store.add(f"{place}/count", 0) >= self.size)

    def send(self, place: str, value: Any) -> None:
        """Let the other processes have a value."""
        if self._store is not None:
            self._store.set(place, json.dumps(value))

    def receive(self, place: str) -> Any:
        """Wait for a value of another process; errors as of `meet`."""
        assert self._store is not None
        self._wait(lambda store: store.check([place]))
        return json.loads(self._store.get(place))

    @contextlib.contextmanager
    def counting(self, meter: Meter) -> Iterator[None]:
        """A scope in which this process copies: bytes are added up over all, and an error anywhere stops it."""
        if self._store is None:
            yield
            return
        end = threading.Event()
        watching = started(lambda: self._watch(meter, end))
        try:
            yield
        finally:
            with Deferral():
                end.set()
                watching.join()
        self._check()

    def fail(self, error: BaseException) -> None:
        """Let the first process tell of an error, which is what all end with."""
        if self._store is None:
            return
        if isinstance(error, ConvertError):
            record = {"kind": "ConvertError", "message": error.message, "items": list(error.items), "hint": error.hint}
        else:
            record = {"kind": type(error).__name__, "message": str(error), "items": [], "hint": None}
        with contextlib.suppress(Exception):  # a store that has gone: torchrun has ended it
            self._store.compare_set("error", "", json.dumps({"rank": self.rank, **record}))
            # torchrun ends all when one has ended, and whoever was asked to end has no time
            if not self.is_first and isinstance(error, Exception):
                until = time.monotonic() + LAST_WORD
                while time.monotonic() < until and not self._store.check(["reported"]):
                    time.sleep(LOOK_EVERY)

    def release(self) -> None:
        """Let the others end: the first process has said what there is to say."""
        if self._store is not None:
            with contextlib.suppress(Exception):
                self._store.set("reported", "")

    def _watch(self, meter: Meter, end: threading.Event) -> None:
        store = self._store
        assert store is not None
        kept = sent = meter.done  # of files that were complete, which every process has counted
        while not end.wait(BEAT_EVERY / 4):
            try:
                done = meter.done
                total = store.add("bytes", done - sent)
                sent = done
                if self.is_first:
                    meter.show(kept + total)
                self._check()
            except Exception:  # reported by `counting`, which looks again
                meter.stop.set()
                return

    def _wait(self, came: Callable[[Store], bool]) -> None:
        assert self._store is not None
        while True:
            self._check()
            if came(self._store):
                return
            time.sleep(LOOK_EVERY)

    def _check(self) -> None:
        """Tell the others that this process lives, and look whether they do, and whether one has failed."""
        store, now = self._store, time.monotonic()
        assert store is not None
        try:
            failed = store.check(["error"])
            record = json.loads(store.get("error")) if failed else None
            if not failed and now - self._told >= BEAT_EVERY:
                self._told = now
                store.add(f"beat/{self.rank}", 1)
                record = self._silent(store, now)
        except RuntimeError as error:  # torch's own errors of a store are of this kind
            raise ConvertError("the processes of this conversion have lost one another", items=[str(error)]) from error
        if record is None:
            return
        if not self.is_first:
            raise OtherRankError(record["message"])
        raise ConvertError(
            f"rank {record['rank']} of {self.size}: {record['message']}", items=record["items"], hint=record["hint"]
        )

    def _silent(self, store: Store, now: float) -> dict[str, Any] | None:
        """Return the error of a process that has said nothing for long; only the first one looks for it."""
        for rank in range(1, self.size) if self.is_first else ():
            beats = store.add(f"beat/{rank}", 0)
            if beats != self._beats.get(rank, (0, 0.0))[0] or rank not in self._beats:
                self._beats[rank] = (beats, now)
            elif now - self._beats[rank][1] > SILENCE:
                message = f"it has said nothing for {SILENCE:.0f} s: was it killed?"
                return {"rank": rank, "message": message, "items": [], "hint": None}
        return None


ALONE = Ranks()


def is_shared(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process is one of several that torchrun, or what sets the same variables, has started."""
    return all(name in environment for name in VARIABLES) and int(environment["WORLD_SIZE"]) > 1


def connected(environment: Mapping[str, str] = os.environ) -> Ranks:
    """Return this process among those that torchrun has started.

    Raises:
        ConvertError: the first of them cannot be reached.
    """
    if not is_shared(environment):
        return ALONE
    from torch.distributed import PrefixStore, TCPStore

    rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    hosted = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun itself runs the store
    try:
        store = TCPStore(
            host,
            port,
            world_size=None,
            is_master=rank == 0 and not hosted,
            timeout=datetime.timedelta(seconds=CONNECT),
            wait_for_workers=False,
        )
    except RuntimeError as error:
        raise ConvertError(
            f"rank {rank} cannot reach the store of rank 0 at {host}:{port} from {socket.gethostname()}",
            items=[str(error).splitlines()[0]],
        ) from error
    # the attempts of one torchrun share a store
    attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Ranks(rank, size, PrefixStore(f"mcore-convert/{attempt}", store))


_current: ContextVar[Ranks] = ContextVar("ranks", default=ALONE)


def current() -> Ranks:
    """Return the processes that this conversion is shared with; this one alone unless they have `joined`."""
    return _current.get()


@contextlib.contextmanager
def joined() -> Iterator[Ranks]:
    """A scope in which all processes that torchrun has started do one thing together.

    Raises:
        ConvertError: they cannot reach one another.
    """
    ranks = connected()
    token = _current.set(ranks)
    try:
        yield ranks
    except BaseException as error:
        ranks.fail(error)
        raise
    finally:
        _current.reset(token)
