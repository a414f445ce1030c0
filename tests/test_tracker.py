"""The tracker file of a run is read the same way in every format."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mcore_convert.errors import UnreadableCheckpoint
from mcore_convert.formats.mp_rank import directory as mp_rank
from mcore_convert.formats.torch_dist import checkpoint as torch_dist


@pytest.mark.parametrize("resolve", [mp_rank.resolve, torch_dist.resolve])
@pytest.mark.parametrize("said", ["9" * 5000, "newest", "-1", ""])
def test_nonsense_in_the_tracker_is_refused(said: str, resolve: Callable[[Path], Path], tmp_path: Path) -> None:
    (tmp_path / torch_dist.TRACKER).write_text(said)
    with pytest.raises(UnreadableCheckpoint, match="which is neither an iteration nor `release`"):
        resolve(tmp_path)
