"""Work in a few threads, for which the main thread waits in a way that signals can interrupt.

A signal handler that raises, as those of Ctrl-C and of the command do, may do so inside the classes of `threading`: a
lock that the main thread has just acquired is then never released, and every thread that needs it waits forever. So
threads are started and joined while signals are deferred, and the main thread waits on a `SimpleQueue`, which the
interpreter implements and which holds no lock when a signal comes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from mcore_convert.storage.deferral import Deferral

Job = TypeVar("Job")
Result = TypeVar("Result")
Outcome = tuple[Any, BaseException | None]  # the result of a function, or its exception


def _processors() -> int:
    """Return the number of processors for this process; torchrun says how many processes share the machine."""
    every = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    sharing = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, every // max(1, int(sharing if sharing.isdigit() else 1)))


WORKERS = _processors()


def in_threads(
    work: Callable[[Job], Result],
    jobs: Iterable[Job],
    take: Callable[[Result], object] = lambda result: None,
    *,
    workers: int | None = None,
    stop: threading.Event | None = None,
) -> None:
    """Run a function for each job in a few threads, and pass the results on in the order of the jobs.

    After an error or a signal no further job begins, and the exception is raised when the running jobs have ended.

    Args:
        work: the function, which may run in several threads at once.
        jobs: drawn one by one, when a thread is free.
        take: gets the results, in the calling thread.
        workers: how many threads; WORKERS unless given.
        stop: set when an error or a signal ends the work, so that running jobs may end early; setting it ends the work.
    """
    done: SimpleQueue[tuple[int, Outcome] | None] = SimpleQueue()
    drawing, source = threading.Lock(), iter(jobs)
    ended = stop or threading.Event()
    drawn = 0

    def run() -> None:
        nonlocal drawn
        while not ended.is_set():
            with drawing:
                number, drawn = drawn, drawn + 1
                job, error = _outcome(lambda: next(source, done))
            if job is done:  # sentinel for the end
                break
            outcome = (None, error) if error is not None else _outcome(partial(work, job))
            if outcome[1] is not None:
                ended.set()
            done.put((number, outcome))
        done.put(None)

    threads = [threading.Thread(target=run, daemon=True) for _ in range(workers or WORKERS)]
    with Deferral() as signals:
        started = 0
        try:
            for thread in threads:
                thread.start()
                started += 1
            try:
                signals.admit()
                _hand_on(done, take, started)
            finally:
                signals.hold()
        except BaseException:
            ended.set()
            raise
        finally:
            for thread in threads[:started]:
                thread.join()


def _outcome(function: Callable[[], Any]) -> Outcome:
    try:
        return function(), None
    except BaseException as error:
        return None, error


def _hand_on(done: SimpleQueue[tuple[int, Outcome] | None], take: Callable[[Any], object], running: int) -> None:
    """Pass results on in order as they arrive, until every thread has finished."""
    early: dict[int, Outcome] = {}
    following = 0
    while running:
        came = done.get()
        if came is None:
            running -= 1
            continue
        early[came[0]] = came[1]
        while following in early:
            result, error = early.pop(following)
            following += 1
            if error is not None:
                raise error
            take(result)


def started(work: Callable[[], object], name: str | None = None) -> threading.Thread:
    """Start a daemon thread that runs a function, and return it; signals are deferred while it starts."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    with Deferral():
        thread.start()
    return thread


def aside(question: Callable[[], Result]) -> Result:
    """Return the result of a function of other packages that may wait on locks of `threading`.

    In the main thread it runs in a thread of its own, which is abandoned if a signal comes: it may take long.
    """
    if threading.current_thread() is not threading.main_thread():
        return question()
    answer: SimpleQueue[Outcome] = SimpleQueue()
    started(lambda: answer.put(_outcome(question)))
    result, error = answer.get()
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return]


class Line:
    """A background thread that runs functions one after the other.

    The first error is raised by `check`.
    """

    def __init__(self) -> None:
        self._waiting: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._ended: SimpleQueue[None] = SimpleQueue()
        self._error: BaseException | None = None
        self._given_up = False
        self._thread = started(self._run, "line")

    def add(self, function: Callable[[], object]) -> None:
        """Run a function after those before it."""
        self._waiting.put(function)

    def close(self, *, wait: bool) -> None:
        """Wait until all functions have run, or drop those that have not begun."""
        with Deferral() as signals:
            self._given_up = not wait
            self._waiting.put(None)
            try:
                signals.admit()
                self._ended.get()
            except BaseException:
                self._given_up = True
                raise
            finally:
                signals.hold()
                self._thread.join()

    def check(self) -> None:
        """Raise the first error."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while (function := self._waiting.get()) is not None:
            if not self._given_up:
                _, error = _outcome(function)
                self._error = self._error or error
        self._ended.put(None)
