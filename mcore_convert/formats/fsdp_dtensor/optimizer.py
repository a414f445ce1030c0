"""Optimizer state of `fsdp_dtensor`: one tensor per state and parameter, and the fields of the parameter's group.

The keys are those of a nested state dict, joined by dots: `optimizer.state.module.module.module.<name>.exp_avg`. The
number of wrappers before a name depends on the run's dtype (Megatron Core 0.16.1, `distrib_optimizer.py`,
`_param_name`). A state is split as its weight is; a group's fields are not (`fsdp_dtensor_checkpoint.py`,
`handle_swiglu_in_state_dict`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mcore_convert.errors import MappingError, UnreadableCheckpoint, fold
from mcore_convert.formats.base import Common, Training
from mcore_convert.formats.files import dcp
from mcore_convert.formats.megatron.modules import MTP_LAYER, MTP_MODEL_LAYER
from mcore_convert.formats.megatron.param_groups import IDENTIFIERS, WITHOUT, step_of
from mcore_convert.spec.config import arguments
from mcore_convert.spec.names import EXP_AVG, EXP_AVG_SQ, MASTER, OPTIMIZER_STATES

GATE, UP = "_w", "_v"
STATE, GROUPS, STEP = "optimizer.state.", "optimizer.param_to_group_meta.", "step"
# Main weights are in the model, unless `tools/checkpoint/checkpoint_inspector.py` converted them from `torch_dist`.
KINDS = {EXP_AVG: EXP_AVG, EXP_AVG_SQ: EXP_AVG_SQ, "param": MASTER, "fp32_param": MASTER, "master_param": MASTER}
# Fields that distinguish groups: these are read for every parameter, all others once per group.
TELLING = (*IDENTIFIERS, *(f"pre_{name}" for name in IDENTIFIERS), "lr", "weight_decay", STEP)
# Objects with fields of their own in `Training`, or that describe the format and not the run.
NOT_REST = ("args", "checkpoint_version", "iteration", "opt_param_scheduler", "rng_state", "rerun_state_machine")


@dataclass(frozen=True)
class FsdpState:
    """Keys of each parameter's states, by its name, of the step counts, and of the fields of its group.

    `unknown` are all other tensors.
    """

    directory: dcp.Directory
    by_name: Mapping[str, Mapping[str, str]]
    steps: tuple[str, ...]
    fields: Mapping[str, Mapping[str, str]]
    unknown: tuple[str, ...] = ()

    @classmethod
    def of(cls, directory: dcp.Directory, prefix: str) -> FsdpState:
        """Find the state of a model whose weights have the prefix."""
        inner = re.sub(r"^model\d*\.(module\.)*", "", prefix)
        wrapped = re.compile(rf"(?:module\.)*{re.escape(inner)}(.+)\.(\w+)")
        by_name: dict[str, dict[str, str]] = {}
        steps, unknown = [], []
        for key in directory.tensors:
            if not key.startswith("optimizer.") or key.startswith(GROUPS):
                continue
            matched = wrapped.fullmatch(key.removeprefix(STATE))
            if matched is not None and matched[2] == STEP:
                steps.append(key)
            elif matched is not None and matched[2] in KINDS and f"{prefix}{matched[1]}" in directory.tensors:
                by_name.setdefault(matched[1], {})[KINDS[matched[2]]] = key
            else:
                unknown.append(key)
        fields: dict[str, dict[str, str]] = {}
        for key in directory.under(GROUPS):
            matched = wrapped.fullmatch(key.removeprefix(GROUPS))
            if matched is None:
                continue
            names = {matched[1], matched[1].replace(MTP_MODEL_LAYER, MTP_LAYER)}  # 0.20 renames the states alone
            if any(f"{prefix}{name}{half}" in directory.tensors for name in names for half in ("", GATE)):
                fields.setdefault(matched[1], {})[matched[2]] = key
        return cls(directory, by_name, tuple(steps), fields, tuple(unknown))

    @property
    def states(self) -> tuple[str, ...]:
        """States of every trained weight; the main weights are those of the model unless they are separate.

        Raises:
            MappingError: a tensor is not a state of a weight; nothing is dropped silently.
        """
        if self.unknown:
            raise MappingError(
                f"{len(self.unknown)} keys of the optimizer in `{self.directory.path}` have no place in the state of a "
                "weight",
                items=fold(self.unknown),
                hint=f"only Adam's state is known; {WITHOUT}",
            )
        kinds = {MASTER}.union(*(kinds for kinds in self.by_name.values()))
        return tuple(state for state in OPTIMIZER_STATES if state in kinds)

    @cached_property
    def has_masters(self) -> bool:
        """Whether master copies are stored in addition to the weights."""
        return any(MASTER in kinds for kinds in self.by_name.values())

    def key_of(self, name: str, state: str) -> str:
        """Return the key of one state of a parameter, even if it is missing."""
        return self.by_name.get(name, {}).get(state, f"{STATE}{name}.{state}")

    def training(self, common: Common) -> Training:
        """Return the state that a run needs to resume.

        Raises:
            UnreadableCheckpoint: there are no parameter groups, or they have different numbers of steps.
        """
        groups: dict[str, dict[str, Any]] = {}
        for fields in self.fields.values():
            telling = {name: self.directory.value(fields[name]) for name in TELLING if name in fields}
            kind = repr(sorted(telling.items()))
            if kind not in groups:
                rest = {name: self.directory.value(key) for name, key in fields.items() if name not in telling}
                groups[kind] = {**telling, **rest}
        if not groups:
            raise UnreadableCheckpoint(
                f"the optimizer in `{self.directory.path}` has no `{GROUPS}...`: its groups are not known", hint=WITHOUT
            )
        by_group = any(STEP in group for group in groups.values())
        counted = [{STEP: self.directory.value(key)} for key in self.steps]
        step = step_of([*groups.values(), *counted], self.directory.path)
        rest = {name: value for name, value in common.state.items() if name not in NOT_REST}
        return Training(
            common.iteration or 0,
            True,
            tuple({**group, STEP: step} for group in groups.values()),
            by_group,
            common.state.get("opt_param_scheduler"),
            arguments.plain(rest),
        )
