"""Fixtures of several files that compare with Megatron Core."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mcore_convert.megatron.cpu import import_megatron
from mcore_convert.megatron.parallel import single_process

import_megatron()  # before any file of tests does: what it decorates would be compiled, for seconds on each rank


@pytest.fixture
def alone() -> Iterator[None]:
    with single_process():
        yield
