"""The common state of a `torch_dist` directory: what Megatron Core stores beside tensors and sharded objects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mcore_convert.errors import UnreadableCheckpoint
from mcore_convert.formats.files import dcp
from mcore_convert.formats.files.torch_archive import TorchFile

COMMON = "common.pt"
COMMON_STATE = "common_state/shard_0_1"
OF_OPTIMIZER = "optimizer/common_state"  # the key of that object beside the model's own, where verl stores two


def common_state(path: Path, directory: dcp.Directory, optimizer: Path | None = None) -> dict[str, Any]:
    """Return the common state, from `common.pt` (until 0.18) or the object `common_state` (since 0.19).

    Args:
        optimizer: the directory of the optimizer's state, where that is another one.

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
