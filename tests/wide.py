"""The rest of a matrix: what stands in `make wide`, and not in `make test`.

One family, or one layout that has everything, goes through the whole matrix in `make test`; others take a thin way
through it. The cases in between are marked `wide`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def matrix(cases: Iterable[tuple[Any, ...]], *, thin: Callable[..., bool]) -> list[Any]:
    """Return the cases for `parametrize`: those that `thin` (called with a case's values) accepts as they are, all
    others marked `wide`.
    """
    return [pytest.param(*case, marks=() if thin(*case) else pytest.mark.wide) for case in cases]
