"""Random states of a run's ranks, which are transferred if the ranks of the layout stay the same.

A rank has those of `random`, numpy, torch and CUDA, and of Megatron's own tracker (Megatron-LM 0.12 to 0.19,
`training/checkpointing.py`, `get_rng_state`). They are converted to plain values and rebuilt from them: a state with
any other content is not transferred.

    torch_dist    rng_state/shard_{pp}.{tp}_{pps}.{tps}; with experts over ranks, a third number is the DP rank
    torch         `rng_state` in the file of each rank
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mcore_convert.formats.files.pickles import StandIn
from mcore_convert.formats.files.torch_tree import Hole
from mcore_convert.formats.random_states import Place, RandomStates
from mcore_convert.storage.sources import open_file
from mcore_convert.storage.views import TensorMeta, View

KEY = "rng_state"
TENSORS = ("torch_rng_state", "cuda_rng_state")
ARRAYS = ("numpy._core.multiarray", "numpy.core.multiarray")  # since numpy 2, and before
WORDS = (624,)  # of a Mersenne Twister
MAX_BYTES = 2**20  # of one tensor


class _Foreign(Exception):
    """Signal that a state has content that random states do not have."""


def random_states(contents: Mapping[Place, Any], axes: tuple[str, ...], sizes: Place, ep: int) -> RandomStates | None:
    """Return the states of all ranks from their stored contents; None if one of them is not plain."""
    try:
        return RandomStates(axes, sizes, ep, {place: _list(content) for place, content in contents.items()})
    except _Foreign:
        return None


def _list(content: Any) -> list[Any]:
    if isinstance(content, list) and len(content) == 1 and isinstance(content[0], list):
        (content,) = content  # a sharded object is saved as a list of one
    if not isinstance(content, list) or not content:
        raise _Foreign
    return [_state(state) for state in content]


def _state(state: Any) -> dict[str, Any]:
    if not isinstance(state, dict):
        raise _Foreign
    plain: dict[str, Any] = {}
    for name, value in state.items():
        if name in TENSORS:
            plain[name] = _tensor(value)
        elif name == "rng_tracker_states" and isinstance(value, dict) and all(isinstance(key, str) for key in value):
            plain[name] = {key: _tensor(each) for key, each in value.items()}
        elif name == "np_rng_state" and isinstance(value, tuple) and len(value) == 5:
            kind, words, *rest = value
            plain[name] = (_plain(kind), _words(words), *map(_plain, rest))
        elif name == "random_rng_state":
            plain[name] = _plain(value)
        else:
            raise _Foreign
    return plain


def _tensor(value: Any) -> Hole:
    if not isinstance(value, View) or not value.is_contiguous or value.nbytes > MAX_BYTES:
        raise _Foreign
    with open_file(value.path) as file:
        file.seek(value.offset)
        content = file.read(value.nbytes)
    if len(content) != value.nbytes:
        raise _Foreign
    return Hole(TensorMeta(value.shape, value.dtype), content)


def _words(value: Any) -> np.ndarray[Any, Any]:
    """Return the state of numpy's generator: an array, whose bytes are in the pickle."""
    kind = type(value)
    if not isinstance(value, StandIn) or kind.__module__ not in ARRAYS or kind.__name__ != "_reconstruct":
        raise _Foreign
    match getattr(value, "state", None):
        case (1, shape, StandIn(arguments=("u4", *_), state=(_, "<", *_)), False, bytes(content)) if (
            shape == WORDS and len(content) == 4 * WORDS[0]
        ):
            return np.array(np.frombuffer(content, "<u4"))
    raise _Foreign


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    if value is None or type(value) in (int, float, str):
        return value
    raise _Foreign
