"""Kinds of tests: each test has one marker of them, and unit tests start no process."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.conftest import ProcessInUnitTest
from tests.kinds import KINDS, TESTS, UnknownKind, kind_of


def test_the_folder_is_the_kind() -> None:
    assert kind_of(TESTS / "train" / "test_pack.py") == "train"
    assert kind_of(TESTS / "unit" / "deeper" / "test_new.py") == "unit"


def test_a_file_in_no_folder_has_no_kind() -> None:
    with pytest.raises(UnknownKind, match="unit,oracle,train,browser"):
        kind_of(TESTS / "test_pack.py")


def test_every_file_has_one_kind_and_at_most_400_lines() -> None:
    for path in TESTS.rglob("test_*.py"):
        assert kind_of(path) in KINDS
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 400, path


@pytest.mark.oracle
def test_a_marker_decides_before_the_file(request: pytest.FixtureRequest) -> None:
    assert [kind for kind in KINDS if request.node.get_closest_marker(kind)] == ["oracle"]


def test_this_test_is_of_its_file(request: pytest.FixtureRequest) -> None:
    assert [kind for kind in KINDS if request.node.get_closest_marker(kind)] == ["unit"]


def test_unit_tests_start_no_process() -> None:
    for start in (lambda: subprocess.run(["true"]), os.fork, lambda: os.system("true")):
        with pytest.raises(ProcessInUnitTest, match="test_unit_tests_start_no_process starts a process"):
            start()
