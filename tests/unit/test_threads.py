"""Threads that work while the main one waits: results in order, errors, and signals at any instruction."""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mcore_convert.storage import deferral, threads
from mcore_convert.storage.ranges import Cache, Ranges
from mcore_convert.storage.threads import Line, aside, in_threads
from tests.stopping import SignalAt, Stopped

EACH = int(os.environ.get("SIGNALS_EACH", "7"))
TRACED = {module.__file__ for module in (deferral, threads, threading)}


def test_results_come_in_the_order_of_the_jobs() -> None:
    results: list[int] = []
    by: set[threading.Thread] = set()

    def work(job: int) -> int:
        by.add(threading.current_thread())
        time.sleep(0.001 * (job % 3))
        return job * job

    in_threads(work, iter(range(50)), results.append, workers=4)
    assert results == [job * job for job in range(50)]
    assert len(by) == 4
    assert not any(each.is_alive() for each in by)


@pytest.mark.parametrize("error", [ValueError, StopIteration, SystemExit])
def test_the_first_error_in_order_ends_what_has_not_begun(error: type[BaseException]) -> None:
    begun: list[int] = []
    results: list[int] = []
    stop = threading.Event()

    def work(job: int) -> int:
        begun.append(job)
        if job in (5, 6):
            time.sleep(0.02 * (7 - job))  # the later job is the first to fail
            raise error(job)
        return job

    with pytest.raises(error) as failed:
        in_threads(work, range(1000), results.append, workers=2, stop=stop)
    assert failed.value.args == (5,)
    assert results == list(range(5))
    assert len(begun) < 10
    assert stop.is_set()


def test_an_error_of_what_draws_the_jobs_is_raised() -> None:
    def jobs() -> Iterator[int]:
        yield 1
        raise ValueError("no more")

    results: list[int] = []
    with pytest.raises(ValueError, match="no more"):
        in_threads(lambda job: job, jobs(), results.append, workers=2)
    assert results == [1]


def test_an_error_of_who_takes_the_results_is_raised() -> None:
    stop = threading.Event()
    with pytest.raises(ZeroDivisionError):
        in_threads(lambda job: job, range(10**6), lambda job: 1 // job, workers=2, stop=stop)
    assert stop.is_set()


def test_a_line_goes_on_after_an_error_and_tells_the_first() -> None:
    done: list[int] = []
    line = Line()
    for number in range(4):
        line.add(lambda number=number: done.append(1 // (number - 1)))  # type: ignore[misc]
    line.close(wait=True)
    assert done == [-1, 1, 0]
    with pytest.raises(ZeroDivisionError):
        line.check()


def test_what_a_line_has_not_begun_is_given_up() -> None:
    began, goes_on, late = threading.Event(), threading.Event(), threading.Event()
    line = Line()

    def work() -> None:
        began.set()
        goes_on.wait(10)

    line.add(work)
    line.add(late.set)
    began.wait(10)
    threading.Timer(0.05, goes_on.set).start()
    line.close(wait=False)
    line.check()
    assert not late.is_set()


def many() -> None:
    """Work in two threads, on jobs that are many enough for the main thread to wait."""
    in_threads(lambda job: time.sleep(0.0005), range(3), workers=2)


def one_after_the_other() -> None:
    line = Line()
    complete = False
    try:
        for _ in range(2):
            line.add(lambda: time.sleep(0.0005))
        complete = True
    finally:
        line.close(wait=complete)
    line.check()


def question() -> None:
    assert aside(lambda: threading.Event().wait(0.0005)) is False


class Content(Ranges):
    """A remote file without a remote."""

    def __init__(self, cache: Cache) -> None:
        self.path, self.size, self._cache, self._at, self.identity = Path("x"), 256, cache, 0, ("x",)  # type: ignore[assignment]

    def fetch(self, start: int, stop: int) -> bytes:
        return bytes(range(start, stop))


def read() -> None:
    cache = Cache(16, 64, 64)
    assert Content(cache).read(40) == bytes(range(40))


@pytest.mark.slow
@pytest.mark.parametrize("action", [many, one_after_the_other, question, read])
def test_a_signal_at_any_instruction_leaves_no_lock_taken(action: Callable[[], None]) -> None:
    before, others = signal.getsignal(signal.SIGINT), threading.enumerate()
    with SignalAt(TRACED) as counted:
        action()
    stopped = 0
    for number in range(0, counted.count, EACH):
        with SignalAt(TRACED, number):
            try:
                action()
            except Stopped as stop:
                stopped += 1
                traceback.clear_frames(stop.__traceback__)
                del stop
        assert signal.getsignal(signal.SIGINT) is before
    assert stopped
    for each in threading.enumerate():
        if each not in others and not each.name.startswith(("line", "ranges")):  # which wait for work
            each.join()
