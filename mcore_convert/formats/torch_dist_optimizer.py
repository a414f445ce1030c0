"""Optimizer state in `torch_dist`: which of Megatron's forms it has, and what stands beside its tensors.

    optimizer.state.fp32_param.<key>    the plain optimizers, and the distributed one's `fully_sharded_model_space`
                                        (Megatron Core 0.8 to 0.14), whose tensors are stored flattened
    optimizer.state.param.<key>         the distributed optimizer's `fully_reshardable` (0.15 and later)
    optimizer.distributed.dp_group_..   its `dp_reshardable` (0.15 and later): flat buckets, see `torch_dist_buckets`

`exp_avg` and `exp_avg_sq` stand beside either. `<key>` is the weight's own. Optimizers may be chained, one for the
parameters of experts and one for all others: then a form that is bound to its layout has `chained_N.` before its keys.
"""

from __future__ import annotations

import re
import struct
from argparse import Namespace
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mcore_convert.errors import MappingError, UnreadableCheckpoint, fold
from mcore_convert.formats import dcp
from mcore_convert.formats.base import Findings, Training
from mcore_convert.formats.module_buffers import Place
from mcore_convert.formats.torch_dist_buckets import BUCKET_KEY, BucketState
from mcore_convert.formats.torch_dist_keys import StateKeys, with_expert_norms
from mcore_convert.spec.arguments import TorchDtype
from mcore_convert.spec.dims import Dims
from mcore_convert.spec.family import Item
from mcore_convert.spec.names import EXP_AVG, EXP_AVG_SQ, MASTER, OPTIMIZER_STATES
from mcore_convert.tensors import Slot, View

STATE_KEY = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(\w+)\.(.+)")
GROUP_KEY = re.compile(r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.(\w+)/shard_0_1")
KINDS = {"param": MASTER, "fp32_param": MASTER, "exp_avg": EXP_AVG, "exp_avg_sq": EXP_AVG_SQ}

FULLY_RESHARDABLE = "fully_reshardable"
UNREADABLE_TYPES = {
    "dp_zero_gather_scatter": "save it again without `--no-ckpt-fully-parallel-save`, or",
    "fully_sharded_bucket_space": "save it again with Megatron Core 0.8 or later, or",
    "fsdp_dtensor": "save it again without Megatron-FSDP, or",
}
WITHOUT = "leave the optimizer state behind with --no-optimizer"

# What tells two parameter groups apart (Megatron Core, `optimizer.py`, `param_group_identifier_keys`).
IDENTIFIERS = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")

# What has a place of its own in `Training`, or is bound to the ranks that saved it.
NOT_REST = ("args", "checkpoint_version", "iteration", "optimizer", "opt_param_scheduler", "content_metadata")


@dataclass(frozen=True)
class NamedState:
    """Optimizer state under the names of the weights."""

    by_state: Mapping[str, StateKeys]
    found_by_order = False

    @property
    def states(self) -> tuple[str, ...]:
        """What it keeps of every trained weight."""
        return tuple(state for state in OPTIMIZER_STATES if state in self.by_state)

    def locate(self, item: Item, dims: Dims, findings: Findings) -> list[Slot]:
        """The boxes of one state of one weight."""
        if item.state not in self.by_state:
            findings.missing.append(str(item))
            return []
        return self.by_state[item.state].locate(item.weight, item.at, dims, findings)

    def replicas(self, item: Item, dims: Dims) -> Iterable[tuple[Slot, str]]:
        """None: every element is stored once."""
        return ()


OptimizerState = NamedState | BucketState


def find(
    directory: dcp.Directory,
    prefix: str,
    weights: StateKeys,
    keys: Iterable[str],
    common: Mapping[str, Any],
    reserved: Mapping[str, list[Slot]] | None = None,
) -> OptimizerState | None:
    """The optimizer state of a checkpoint; None where it has none.

    Args:
        prefix: what a wrapper around the model put before every key.
        keys: of everything that belongs to the optimizer.
        common: the common state.
        reserved: the slots of a checkpoint that is yet to be written.

    Raises:
        MappingError: a tensor that has no place in a weight's state; nothing is left out in silence.
        UnreadableCheckpoint: a form that is bound to its ranks, or in which no order of the modules fits.
    """
    named: dict[str, dict[str, str]] = {}
    buckets: dict[Place, dict[str, str]] = {}
    unknown = []
    for on_disk in keys:
        key = on_disk.removeprefix(prefix)
        is_tensor = on_disk in directory.tensors
        if is_tensor and (state := STATE_KEY.fullmatch(key)) and state[1] in KINDS:
            named.setdefault(state[1], {})[state[2].removeprefix(prefix)] = on_disk
        elif is_tensor and (bucket := BUCKET_KEY.fullmatch(key)) and bucket["kind"] in KINDS:
            chain, group, buffer, number = (int(bucket[name] or 0) for name in ("chain", "group", "buffer", "bucket"))
            buckets.setdefault((chain, group, buffer, number), {})[bucket["kind"]] = on_disk
        elif is_tensor or not (found := GROUP_KEY.fullmatch(key)) or found[3] == "param_state":
            unknown.append(on_disk)
    _refuse_types(directory, common)
    if unknown:
        raise MappingError(
            f"{len(unknown)} keys of the optimizer in `{directory.path}` have no place in the state of a weight",
            items=fold(unknown),
            hint=f"only Adam's state is known; {WITHOUT}",
        )
    if named and buckets:
        raise UnreadableCheckpoint(f"`{directory.path}` holds optimizer state in two forms", hint=WITHOUT)
    if buckets:
        args = common.get("args")
        return BucketState(directory, buckets, weights, dict(vars(args)) if isinstance(args, Namespace) else None)
    return _named_state(directory, weights, named, reserved) if named else None


def _named_state(
    directory: dcp.Directory,
    weights: StateKeys,
    named: Mapping[str, Mapping[str, str]],
    reserved: Mapping[str, list[Slot]] | None,
) -> NamedState:
    if {"param", "fp32_param"} <= named.keys():
        raise UnreadableCheckpoint(f"`{directory.path}` holds two master copies of its weights", hint=WITHOUT)
    by_state = {}
    strangers = []
    for kind, keys in named.items():
        keys = with_expert_norms(keys)
        strangers += [on_disk for key, on_disk in keys.items() if key not in weights.keys]
        by_state[KINDS[kind]] = StateKeys(directory, keys, f"optimizer.state.{kind}.", reserved)
    if strangers:
        raise MappingError(
            f"{len(strangers)} tensors of the optimizer in `{directory.path}` belong to no weight of its model",
            items=fold(strangers),
            hint=WITHOUT,
        )
    return NamedState(by_state)


def check_whole(directory: dcp.Directory, state: OptimizerState | None) -> None:
    """Prove that the chunks of named state tile it. Buckets have paddings; their weights are proven one by one."""
    if isinstance(state, NamedState):
        directory.check(on_disk for keys in state.by_state.values() for on_disk in keys.keys.values())


def sharding_types(common: Mapping[str, Any]) -> set[str]:
    """What Megatron's distributed optimizers said that their form is; nothing for plain ones and before 0.8."""
    said = [(common.get("content_metadata") or {}).get("distrib_optim_sharding_type")]
    said += [each.get("param_state_sharding_type") for each in _optimizers(common)]
    return {each for each in said if isinstance(each, str)}


def _refuse_types(directory: dcp.Directory, common: Mapping[str, Any]) -> None:
    for kind in sorted(sharding_types(common) & UNREADABLE_TYPES.keys()):
        raise UnreadableCheckpoint(
            f"the optimizer state in `{directory.path}` has the form `{kind}`, which is not read",
            hint=f"{UNREADABLE_TYPES[kind]} {WITHOUT}",
        )
    if "fully_sharded_model_space" in sharding_types(common) and not directory.unflattened:
        raise UnreadableCheckpoint(
            f"the optimizer state in `{directory.path}` is flattened, and the shapes from before are not stored",
            hint=f"save it again with Megatron Core 0.8 or later, or {WITHOUT}",
        )


def training_of(directory: dcp.Directory, prefix: str, keys: Iterable[str], common: Mapping[str, Any]) -> Training:
    """What a run needs to go on, from the common state and from the objects that a data-parallel group stores.

    Raises:
        UnreadableCheckpoint: there are no parameter groups, or groups do not agree on the steps that they took.
    """
    optimizers = _optimizers(common)
    extra: dict[str, Any] = {}
    by_chain: dict[int, dict[str, Any]] = {}
    for on_disk in sorted(keys, key=_natural):
        found = GROUP_KEY.fullmatch(on_disk.removeprefix(prefix))
        if found is not None and found[3] in ("optimizer", "grad_scaler"):
            (content,) = _unwrapped(directory.object(on_disk))
            _add_groups(by_chain.setdefault(int(found[1] or 0), {}), {found[3]: content})
    stored = [by_chain[chain] for chain in sorted(by_chain)] if by_chain else optimizers
    groups: list[dict[str, Any]] = []
    for each in stored:
        inner = each.get("optimizer", each)
        step = inner.get("state", {}).get("common_step") if isinstance(inner.get("state"), dict) else None
        for group in inner.get("param_groups", ()):
            known = {name: plain(value) for name, value in group.items() if name != "params"}
            groups.append({**({} if step is None else {"step": plain(step)}), **known})
        if each.get("grad_scaler"):
            extra["grad_scaler"] = plain(each["grad_scaler"])
    steps = {group["step"] for group in groups if "step" in group}
    if not groups or len(steps) != 1:
        raise UnreadableCheckpoint(
            f"the optimizer in `{directory.path}` {'took several' if steps else 'has no'} "
            f"{'numbers of steps' if groups else 'parameter groups'}",
            items=[str(step) for step in sorted(steps)],
            hint=WITHOUT,
        )
    (step,) = steps
    rest = {name: value for name, value in common.items() if name not in NOT_REST and is_plain(value)}
    scheduler = common.get("opt_param_scheduler")
    iteration = common.get("iteration")
    return Training(
        iteration if isinstance(iteration, int) else 0,
        bool(sharding_types(common)),
        tuple({**group, "step": step} for group in groups),
        None if scheduler is None else plain(scheduler),
        {**rest, **extra},
    )


def _optimizers(common: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What the common state holds of each optimizer: of one, or of several that are chained."""
    stored = common.get("optimizer")
    if not isinstance(stored, dict):
        return []
    chained = stored and all(isinstance(key, int) for key in stored)
    return [stored[key] for key in sorted(stored)] if chained else [stored]


def _add_groups(into: dict[str, Any], found: Mapping[str, Any]) -> None:
    """Add the parameter groups of one more rank to those of its optimizer; a stage may lack some."""
    into.update({name: content for name, content in found.items() if name != "optimizer"})
    if "optimizer" not in found:
        return
    groups = into.setdefault("optimizer", {"param_groups": []})["param_groups"]
    for group in found["optimizer"].get("param_groups", ()):
        mine = [group.get(name, group.get(f"pre_{name}")) for name in IDENTIFIERS]
        same = [g for g in groups if [g.get(name, g.get(f"pre_{name}")) for name in IDENTIFIERS] == mine]
        if not same:
            groups.append(dict(group))
        elif "step" not in same[0] or same[0]["step"] == group.get("step", same[0]["step"]):
            same[0].setdefault("step", group.get("step")) if "step" in group else None
        else:
            groups.append(dict(group))  # the steps differ, which the caller refuses


def _unwrapped(stored: Any) -> tuple[Any]:
    """A sharded object is saved as a list of one."""
    return (stored[0],) if isinstance(stored, list) and len(stored) == 1 else (stored,)


def _natural(key: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", key)]


def plain(value: Any) -> Any:
    """The value with every tensor of one element in it read as a number."""
    if isinstance(value, View):
        return _number(value)
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(plain(each) for each in value)
    return value


def is_plain(value: Any) -> bool:
    """Whether a value consists of numbers, texts and containers of these, so that it can be written again."""
    if isinstance(value, dict):
        return all(is_plain(each) for pair in value.items() for each in pair)
    if isinstance(value, list | tuple):
        return all(is_plain(each) for each in value)
    return value is None or isinstance(value, bool | int | float | str | TorchDtype)


def _number(view: View) -> Any:
    codes = {"float32": "f", "float64": "d", "int64": "q", "int32": "i", "float16": "e", "bool": "?"}
    if view.nbytes != view.itemsize or view.dtype not in codes:
        raise UnreadableCheckpoint(f"`{view.path}` has a tensor of shape {list(view.shape)} where a number belongs")
    with view.path.open("rb") as file:
        file.seek(view.offset)
        (number,) = struct.unpack(f"<{codes[view.dtype]}", file.read(view.itemsize))
    return number
