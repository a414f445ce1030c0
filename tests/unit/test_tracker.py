"""The tracker file of a run is read the same way in every format."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_convert.checkpoints.identify import open_checkpoint
from mcore_convert.errors import UnreadableCheckpoint
from mcore_convert.formats.megatron.run_directory import TRACKER
from mcore_convert.formats.mp_rank.directory import open_mp_rank
from mcore_convert.formats.torch_dist.checkpoint import open_torch_dist


@pytest.mark.parametrize("opener", [open_checkpoint, open_mp_rank, open_torch_dist])
@pytest.mark.parametrize("content", ["9" * 5000, "newest", "-1", ""])
def test_nonsense_in_the_tracker_is_refused(content: str, opener: object, tmp_path: Path) -> None:
    assert callable(opener)
    (tmp_path / TRACKER).write_text(content)
    with pytest.raises(UnreadableCheckpoint, match="which is neither an iteration nor `release`"):
        opener(tmp_path)
