"""Kinds of tests: each test has one marker of them, and unit tests start no process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests import kinds
from tests.conftest import ProcessInUnitTest
from tests.kinds import KINDS, TESTS, files_of, kind_of


def test_a_folder_decides_before_the_name() -> None:
    assert kind_of(TESTS / "train" / "test_pack.py") == "train"
    assert kind_of(TESTS / "unit" / "deeper" / "test_new.py") == "unit"
    assert kind_of(TESTS / "test_pack.py") == "unit"


def test_what_is_listed_nowhere_is_not_in_make_check() -> None:
    assert kind_of(TESTS / "test_of_no_kind.py") == "oracle"


def test_every_file_has_one_kind() -> None:
    names = [name for listed in kinds.FILES.values() for name in listed.split()]
    assert len(set(names)) == len(names)
    files = [path for kind in KINDS for path in files_of(kind)]
    assert sorted(files) == sorted(TESTS.rglob("test_*.py"))


@pytest.mark.oracle
def test_a_marker_decides_before_the_file(request: pytest.FixtureRequest) -> None:
    assert [kind for kind in KINDS if request.node.get_closest_marker(kind)] == ["oracle"]


def test_this_test_is_of_its_file(request: pytest.FixtureRequest) -> None:
    assert [kind for kind in KINDS if request.node.get_closest_marker(kind)] == ["unit"]


def test_unit_tests_start_no_process() -> None:
    for start in (lambda: subprocess.run(["true"]), os.fork, lambda: os.system("true")):
        with pytest.raises(ProcessInUnitTest, match="test_unit_tests_start_no_process starts a process"):
            start()


@pytest.mark.slow
def test_unless_they_are_marked() -> None:
    """As `make check` lists its files."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.kinds", "unit"], cwd=kinds.ROOT, text=True, capture_output=True, check=True
    )
    assert [kinds.ROOT / line for line in done.stdout.splitlines()] == files_of("unit")
