"""A file system that fails: the n-th call of a function is refused, or does less than it was asked for."""

from __future__ import annotations

import contextlib
import errno
import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

from mcore_convert.storage import mapping

# What each function that changes or reads files may answer. A short one does half of its work.
FAULTS: dict[str, tuple[str, ...]] = {
    "pwrite": ("EIO", "ENOSPC", "EINTR", "short", "zero"),
    "preadv": ("EIO", "short", "zero"),
    "pread": ("EIO", "short", "zero"),
    "copy_file_range": ("EIO", "ENOSPC", "EXDEV", "ENOSYS", "EINVAL", "short", "zero"),
    "open": ("EIO", "ENOSPC", "EACCES"),
    "ftruncate": ("EIO", "EFBIG", "nothing"),
    "fallocate": ("EIO", "ENOSPC"),
    "fsync": ("EIO", "ENOSPC"),
    "mkdir": ("EIO", "ENOSPC"),
    "rename": ("EIO", "EXDEV"),
    "replace": ("EIO",),
}


def owner(function: str) -> Any:
    """Return the module whose function is replaced."""
    return mapping if function == "fallocate" else os


class Fault(NamedTuple):
    """The `number`-th call of a function, from 0, goes wrong in this way."""

    function: str
    number: int
    kind: str


def _failing(real: Callable[..., Any], kind: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    if kind in ("zero", "nothing"):
        return b"" if real.__name__ == "pread" else 0
    if kind != "short":
        path = next((str(word) for word in arguments if isinstance(word, str | os.PathLike)), None)
        raise OSError(getattr(errno, kind), os.strerror(getattr(errno, kind)), path)
    words = list(arguments)
    if real.__name__ == "pwrite":
        words[1] = memoryview(words[1])[: max(1, len(words[1]) // 2)]
    elif real.__name__ == "preadv":
        words[1] = [memoryview(words[1][0])[: max(1, len(words[1][0]) // 2)]]
    elif real.__name__ == "pread":
        words[1] = max(1, words[1] // 2)
    else:
        words[2] = max(1, words[2] // 2)
    return real(*words, **options)


@contextlib.contextmanager
def counted(fault: Fault | None = None) -> Iterator[Counter[str]]:
    """A scope in which calls are counted by function, and one of them fails."""
    calls: Counter[str] = Counter()

    def wrapped(name: str) -> Callable[..., Any]:
        real = getattr(owner(name), name)

        def call(*arguments: Any, **options: Any) -> Any:
            number = calls[name]
            calls[name] += 1
            if fault is not None and (name, number) == (fault.function, fault.number):
                return _failing(real, fault.kind, arguments, options)
            return real(*arguments, **options)

        return call

    with contextlib.ExitStack() as stack:
        for name in (name for name in FAULTS if hasattr(owner(name), name)):
            stack.enter_context(mock.patch.object(owner(name), name, wrapped(name)))
        yield calls


def every_fault(calls: Counter[str], most: int) -> Iterator[Fault]:
    """Yield each kind of each function, at most so many times each, spread over all of its calls."""
    for function, kinds in FAULTS.items():
        count = calls[function]
        for kind in kinds:
            for number in sorted({step * count // most for step in range(min(most, count))} if count else ()):
                yield Fault(function, number, kind)
