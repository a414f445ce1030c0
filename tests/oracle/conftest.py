"""Fixtures of several files that compare with Megatron Core."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mcore_convert.megatron.parallel import single_process


@pytest.fixture
def alone() -> Iterator[None]:
    with single_process():
        yield
