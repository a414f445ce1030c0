"""Running the command on bad input: what the user sees, and the proof that nothing was left behind."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from mcore_convert.cli import main
from mcore_convert.cli.failures import BUG

GOLDEN = Path(__file__).parent / "golden"
Golden = Callable[[str], str]


class Ended(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


def run(*argv: str | Path) -> Ended:
    """Run one command in this process. What nobody expected, and so would be a bug, is no way to end."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as end:
        main([str(word) for word in argv])
    assert isinstance(end.value.code, int)
    assert end.value.code != BUG, err.getvalue()
    return Ended(end.value.code, out.getvalue(), err.getvalue())


def tree(path: Path) -> dict[str, bytes | str | None]:
    """Everything below a directory: the bytes of files, where links point, None for directories."""
    return {
        str(entry.relative_to(path)): str(entry.readlink())
        if entry.is_symlink()
        else entry.read_bytes()
        if entry.is_file()
        else None
        for entry in sorted(path.rglob("*"))
    }


def refusal(source: Path, *options: str | Path, to: Path | None = None) -> str:
    """Return the message with which a conversion of `source` to `DST` beside it is refused; nothing may have changed.

    Paths are shown relative to the directory that holds both.
    """
    here = source.parent
    before = tree(here)
    ended = run("convert", source, to or here / "DST", *options)
    assert (ended.code, ended.out) == (1, ""), ended
    assert tree(here) == before
    return ended.err.replace(f"{here}/", "").replace(str(here), "HERE")


@cache
def golden_texts(name: str) -> dict[str, str]:
    """Return the texts of a golden file, by the titles (`## ...`) that they stand under."""
    sections = (GOLDEN / name).read_text().split("## ")[1:]
    return {title: text.strip("\n") + "\n" for title, _, text in (section.partition("\n") for section in sections)}
