"""A signal at any instruction of what makes, publishes and removes a destination: nothing half done is left.

`SIGNALS_EACH=1` in the environment tries every instruction, and not every so manieth one alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from mcore_convert.storage import deferral, destination, disk, marker
from mcore_convert.storage.deferral import Deferral
from mcore_convert.storage.destination import claimed
from mcore_convert.storage.disk import write_new, write_whole
from mcore_convert.storage.locking import locked
from tests.refusals import tree
from tests.stopping import SignalAt, Stopped

EACH = int(os.environ.get("SIGNALS_EACH", "41"))
TRACED = {module.__file__ for module in (deferral, destination, disk, marker, contextlib)}


def make(folder: Path) -> None:
    """Do what a conversion does with its destination, in place of an earlier one."""
    with claimed(folder / "deep" / "DST", 10, overwrite=True) as claim:
        write_new(claim.partial / "file", b"new")
        claim.publish()


def lock(folder: Path) -> None:
    with locked(folder / "x.lock", folder / "x") as held:
        held.record()


def write(folder: Path) -> None:
    write_whole(folder / "deep" / "text", b"new")


OLD: dict[str, bytes | str | None] = {"deep": None, "deep/DST": None, "deep/DST/file": b"old", "deep/text": b"old"}
ENDS: dict[Callable[[Path], None], list[dict[str, bytes | str | None]]] = {
    make: [OLD, {**OLD, "deep/DST/file": b"new"}],
    lock: [OLD],
    write: [OLD, {**OLD, "deep/text": b"new"}],
}


@pytest.mark.parametrize("action", ENDS)
def test_a_signal_at_any_instruction(action: Callable[[Path], None], tmp_path: Path) -> None:
    (tmp_path / "deep" / "DST").mkdir(parents=True)

    def reset() -> None:
        (tmp_path / "deep" / "DST" / "file").write_bytes(b"old")
        (tmp_path / "deep" / "text").write_bytes(b"old")

    reset()
    before = signal.getsignal(signal.SIGINT)
    with SignalAt(TRACED) as counted:
        action(tmp_path)
    reached = set()
    for number in range(0, counted.count, EACH):
        reset()
        with SignalAt(TRACED, number):
            try:
                action(tmp_path)
            except Stopped as stop:
                traceback.clear_frames(stop.__traceback__)  # as the command does before it tells what is left
                del stop
        after = tree(tmp_path)
        assert after in ENDS[action], (number, after)
        assert signal.getsignal(signal.SIGINT) is before
        reached.add(ENDS[action].index(after))
    assert reached == set(range(len(ENDS[action])))


def test_a_signal_waits_and_then_comes() -> None:
    order: list[str] = []

    def work(*, admits: bool) -> None:
        with Deferral() as signals:
            signal.raise_signal(signal.SIGINT)
            order.append("held")
            if admits:
                signals.admit()
            order.append("to the end")

    with SignalAt(TRACED), pytest.raises(Stopped):
        work(admits=True)
    with SignalAt(TRACED), pytest.raises(Stopped):
        work(admits=False)
    assert order == ["held", "held", "to the end"]


def test_a_thread_has_nothing_to_wait_for() -> None:
    ended: list[object] = []

    def work() -> None:
        with Deferral() as signals:
            signals.admit()
        ended.append(signals)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(ended) == 1
