"""Fixtures of several files of unit tests."""

from __future__ import annotations

import pytest

from mcore_convert.storage import spans


@pytest.fixture(params=["as it is", "small steps"])
def steps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny tensors are read in one step; so that they are read in many, a step is made small."""
    if request.param == "small steps":
        monkeypatch.setattr(spans, "STEP", 3000)
        monkeypatch.setattr(spans, "PART", 7000)
