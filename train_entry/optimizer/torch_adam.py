"""Additions to Megatron Core's distributed optimizer, for saving and loading torch's Adam.

Megatron Core 0.16.1 is written for the Adam of Apex or Transformer Engine. Without them, on GPUs too,
`optimizer/distrib_optimizer.py` has three defects, all corrected here; with them this module does nothing.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


@contextlib.contextmanager
def torch_adam_goes_on() -> Iterator[None]:
    """Scope in which a distributed optimizer over torch's Adam is saved and loaded correctly; may be nested.

    1. `state_dict` (:641) needs a step count, which torch creates only with the first step: nothing could be saved
       before, nor loaded, since loading calls it too.
    2. `_set_main_param_and_optimizer_states` (:936) copies the state `step` as if it were stored per parameter.
    3. `load_state_dict` (:820) gives all parameters one shared tensor of step counts, so that each step counts once
       per parameter, and the bias correction is silently wrong.
    """
    from megatron.core.optimizer import distrib_optimizer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    if distrib_optimizer.HAVE_APEX_OR_TE or hasattr(DistributedOptimizer.state_dict, "__wrapped__"):
        yield
        return
    mended = {
        "state_dict": _state_dict(DistributedOptimizer.state_dict),
        "load_state_dict": _load_state_dict(DistributedOptimizer.load_state_dict),
        "_set_main_param_and_optimizer_states": _set_states,
    }
    before = {name: getattr(DistributedOptimizer, name) for name in mended}
    for name, function in mended.items():
        setattr(DistributedOptimizer, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(DistributedOptimizer, name, function)


def allocate(adam: torch.optim.Optimizer) -> None:
    """Create the state that torch's Adam would create with its first step, for every parameter that has none."""
    for group in adam.param_groups:
        on_device = group.get("fused") or group.get("capturable")
        for main in group["params"]:
            if not adam.state[main]:
                step = torch.zeros((), dtype=torch.float32, device=main.device if on_device else "cpu")
                moments = {name: torch.zeros_like(main, requires_grad=False) for name in ("exp_avg", "exp_avg_sq")}
                adam.state[main].update(step=step, **moments)


def _state_dict(state_dict: Any) -> Any:
    @functools.wraps(state_dict)
    def mended(self: Any) -> Any:
        if isinstance(self.optimizer, torch.optim.Adam):
            allocate(self.optimizer)
        return state_dict(self)

    return mended


def _load_state_dict(load_state_dict: Any) -> Any:
    @functools.wraps(load_state_dict)
    def mended(self: Any, state: Any) -> None:
        with torch.no_grad():
            load_state_dict(self, state)
        for each in self.optimizer.state.values():
            if "step" in each:
                each["step"] = each["step"].clone()

    return mended


def _set_states(self: Any, parameter: Tensor, tensors: Mapping[str, Tensor]) -> None:
    group, order = self.model_param_group_index_map[parameter]
    main = self.optimizer.param_groups[group]["params"][order]
    with torch.no_grad():
        for name, tensor in {"param": main, **self.optimizer.state[main]}.items():
            if name != "step":
                tensor.copy_(tensors[name])
