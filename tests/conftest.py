"""Fixtures of all tests: the marker of their kind, and tiny checkpoints, made once in a run and never written to."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.kinds import KINDS, kind_of

SHARED = Path(__file__).parents[2] / "shared" / "megatron_checkpoints"

HfMaker = Callable[..., Path]

# How fast a machine is that does other work at the same time is nothing that a test may fail of.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


@pytest.fixture(scope="session")
def hf_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> HfMaker:
    """`hf_checkpoint(name, **options)` of `fixtures.hf.make_hf`, made at the first call with these options."""
    from fixtures.hf import make_hf

    made: dict[tuple[Any, ...], Path] = {}

    def make(name: str, **options: Any) -> Path:
        key = (name, *sorted((k, repr(v)) for k, v in options.items()))
        if key not in made:
            made[key] = make_hf(name, tmp_path_factory.mktemp(name) / "hf", **options)
        return made[key]

    return make


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of commands that start quickly."""
    from tests.warm import commands

    with commands(tmp_path_factory.mktemp("warm")) as folder:
        yield folder


def real_checkpoint(name: str) -> Path:
    """Return a checkpoint that Megatron-LM wrote; the test is skipped where they are not at hand."""
    path = SHARED / name
    if not path.is_dir():
        pytest.skip(f"the real Megatron-LM checkpoint {name} is not at hand")
    return path


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each test the marker of its kind: its own one, or that of its file."""
    for item in items:
        if not any(item.get_closest_marker(kind) for kind in KINDS):
            item.add_marker(kind_of(item.path))


class ProcessInUnitTest(Exception):
    """A unit test starts a process, which `make check` promises not to do."""


STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"}  # Python's audit events
alone: list[str] = []  # the unit test that runs now, if it may start no process


def _refuse_processes(event: str, arguments: tuple[object, ...]) -> None:
    if alone and event in STARTS:
        raise ProcessInUnitTest(f"{alone[-1]} starts a process ({event}): mark it with `slow`, or move it")


sys.addaudithook(_refuse_processes)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Let unit tests start no process unless they say so; their fixtures neither."""
    bound = item.get_closest_marker("unit") is not None and item.get_closest_marker("slow") is None
    alone[:] = [item.nodeid] if bound else []
    try:
        return (yield)
    finally:
        alone.clear()
