"""Processes that share a conversion, as torchrun starts them: their parts, their barriers, and the first error.

They share the file system that holds the target, and communicate through torch.distributed's store alone: no process
group, no CUDA. The first of them claims the destination, and renames it at the end.
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

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # set per process by torchrun and similar launchers
LOOK_EVERY = 0.05  # seconds
BEAT_EVERY = 1.0
SILENCE = 120.0  # seconds after which a process without a heartbeat is taken for dead
CONNECT = 120.0
LAST_WORD = 20.0  # seconds that a failed process waits for the first one to report its error


class Store(Protocol):
    """The methods that are used of `torch.distributed.TCPStore`."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def add(self, key: str, value: int) -> int: ...
    def check(self, keys: list[str]) -> bool: ...
    def compare_set(self, key: str, expected: str, value: str) -> bytes: ...


class OtherRankError(ConvertError):
    """Failure of another process, which the first process reports."""


class Ranks:
    """This process among those that share a conversion; the only one unless a store is given."""

    def __init__(self, rank: int = 0, size: int = 1, store: Store | None = None) -> None:
        self.rank, self.size, self._store = rank, size, store
        self._beats: dict[int, tuple[int, float]] = {}
        self._told = 0.0

    @property
    def is_first(self) -> bool:
        """Whether this process claims the destination and reports for all."""
        return self.rank == 0

    def part(self, sizes: Mapping[Path, int]) -> set[Path]:
        """Return the files of this process: the largest first, each to the process with the fewest bytes so far;
        all ranks compute the same parts.
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
        """Wait until every process has reached this place.

        Raises:
            ConvertError: one of them has failed, or has stopped responding.
        """
        if self._store is None:
            return
        self._store.add(f"{place}/count", 1)
        self._wait(lambda store: store.add(f"{place}/count", 0) >= self.size)

    def send(self, place: str, value: Any) -> None:
        """Send a value to the other processes."""
        if self._store is not None:
            self._store.set(place, json.dumps(value))

    def receive(self, place: str) -> Any:
        """Wait for a value from another process; errors are those of `meet`."""
        assert self._store is not None
        self._wait(lambda store: store.check([place]))
        return json.loads(self._store.get(place))

    @contextlib.contextmanager
    def counting(self, meter: Meter) -> Iterator[None]:
        """Scope of the copying by this process: bytes are summed over all processes, and an error in any stops it."""
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
        """Report an error to the first process; all processes end with it."""
        if self._store is None:
            return
        if isinstance(error, ConvertError):
            record = {"kind": "ConvertError", "message": error.message, "items": list(error.items), "hint": error.hint}
        else:
            record = {"kind": type(error).__name__, "message": str(error), "items": [], "hint": None}
        with contextlib.suppress(Exception):  # the store is gone if torchrun has ended it
            self._store.compare_set("error", "", json.dumps({"rank": self.rank, **record}))
            # torchrun ends all processes once one has ended, and a process asked to end has no time
            if not self.is_first and isinstance(error, Exception):
                until = time.monotonic() + LAST_WORD
                while time.monotonic() < until and not self._store.check(["reported"]):
                    time.sleep(LOOK_EVERY)

    def release(self) -> None:
        """Let the other processes end, once the first one has reported everything."""
        if self._store is not None:
            with contextlib.suppress(Exception):
                self._store.set("reported", "")

    def _watch(self, meter: Meter, end: threading.Event) -> None:
        store = self._store
        assert store is not None
        kept = sent = meter.done  # bytes of files that were already complete, which every process has counted
        while not end.wait(BEAT_EVERY / 4):
            try:
                done = meter.done
                total = store.add("bytes", done - sent)
                sent = done
                if self.is_first:
                    meter.show(kept + total)
                self._check()
            except Exception:  # reported by `counting`, which checks again
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
        """Send a heartbeat, and check whether the other processes live and whether one has failed."""
        store, now = self._store, time.monotonic()
        assert store is not None
        try:
            failed = store.check(["error"])
            record = json.loads(store.get("error")) if failed else None
            if not failed and now - self._told >= BEAT_EVERY:
                self._told = now
                store.add(f"beat/{self.rank}", 1)
                record = self._silent(store, now)
        except RuntimeError as error:  # the class of torch's own errors of a store
            raise ConvertError("the processes of this conversion have lost one another", items=[str(error)]) from error
        if record is None:
            return
        if not self.is_first:
            raise OtherRankError(record["message"])
        raise ConvertError(
            f"rank {record['rank']} of {self.size}: {record['message']}", items=record["items"], hint=record["hint"]
        )

    def _silent(self, store: Store, now: float) -> dict[str, Any] | None:
        """Return the error of a process without a recent heartbeat; only the first process checks for it."""
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
    """Return whether this process is one of several started by torchrun, or by a launcher with its variables."""
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
    # the restarts of one torchrun share a store
    attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Ranks(rank, size, PrefixStore(f"mcore-convert/{attempt}", store))


_current: ContextVar[Ranks] = ContextVar("ranks", default=ALONE)


def current() -> Ranks:
    """Return the processes that share this conversion; this one alone unless they have `joined`."""
    return _current.get()


@contextlib.contextmanager
def joined() -> Iterator[Ranks]:
    """Scope in which all processes that torchrun has started do one thing together.

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
