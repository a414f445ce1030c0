"""Objects of a `torch_dist` directory: the common state, and the random states of the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mcore_convert.errors import UnreadableCheckpoint
from mcore_convert.formats.files import dcp, torch_archive
from mcore_convert.formats.files.torch_archive import TorchFile
from mcore_convert.formats.files.torch_tree import Hole, replaced
from mcore_convert.formats.megatron.random_states import KEY
from mcore_convert.formats.random_states import RandomStates

COMMON = "common.pt"
COMMON_STATE = "common_state/shard_0_1"
OF_OPTIMIZER = "optimizer/common_state"  # key of verl's second common state, that of the optimizer


def common_state(path: Path, directory: dcp.Directory, optimizer: Path | None = None) -> dict[str, Any]:
    """Return the common state, from `common.pt` (until 0.18) or the object `common_state` (since 0.19).

    Args:
        optimizer: the directory of the optimizer's state, if it is separate.

    Raises:
        UnreadableCheckpoint: there is neither.
    """
    state = _state(path, directory, COMMON_STATE)
    if optimizer is not None and "optimizer" not in state:
        state = {**_state(optimizer, directory, OF_OPTIMIZER), **state}
    return state


def _state(path: Path, directory: dcp.Directory, key: str) -> dict[str, Any]:
    file = path / COMMON
    if file.is_file():
        state = TorchFile(file).tree
    elif key in directory.objects:
        state = directory.object(key)
    else:
        raise UnreadableCheckpoint(
            f"`{path}` has neither `{COMMON}` nor `{COMMON_STATE}`",
            hint="the checkpoint was not copied completely",
        )
    if isinstance(state, list) and len(state) == 1:  # a sharded object is saved as a list of one
        (state,) = state
    if not isinstance(state, dict):
        raise UnreadableCheckpoint(f"the common state of `{path}` is not a dict")
    return state


def random_archives(states: RandomStates | None) -> Iterator[tuple[str, torch_archive.Archive]]:
    """Yield the objects of random states: their keys, and their complete archives."""
    if states is None:
        return
    grid = ".".join(map(str, states.sizes))
    for place, content in states.lists.items():
        yield f"{KEY}/shard_{'.'.join(map(str, place))}_{grid}", _archive_of(content)


def _archive_of(content: list[Any]) -> torch_archive.Archive:
    holes: dict[Hole, int] = {}
    replaced(content, lambda hole: holes.setdefault(hole, len(holes)))
    # a sharded object is saved as a list of one
    archive = torch_archive.lay_out(
        lambda refs: [replaced(content, lambda hole: refs[holes[hole]])], [hole.meta for hole in holes]
    )
    return archive.filled(*(hole.content or b"" for hole in holes))
