"""A command that several processes share under torchrun: only the first of them reports."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

SHARED = ("convert", "reshard", "export")  # the commands that divide their work


@contextlib.contextmanager
def sharing(words: Sequence[str]) -> Iterator[AbstractContextManager[object]]:
    """Scope in which only the first process writes output; yields the scope in which all work together.

    A command that cannot be divided is run by the first process alone.
    """
    if "RANK" not in os.environ:  # saves the imports below
        yield contextlib.nullcontext()
        return
    from mcore_convert.conversion.ranks import ALONE, Ranks, is_shared, joined

    if not is_shared():
        yield contextlib.nullcontext()
        return
    is_first = os.environ["RANK"] == "0"
    divides = next((word for word in words if not word.startswith("-")), "") in SHARED
    with contextlib.ExitStack() as stack:
        if not is_first:
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        if not divides:
            if not is_first:
                sys.exit(0)
            yield contextlib.nullcontext()
            return
        ranks: Ranks = ALONE

        @contextlib.contextmanager
        def together() -> Iterator[None]:
            nonlocal ranks
            with joined() as ranks:
                yield

        try:
            yield together()
        finally:
            ranks.release()
