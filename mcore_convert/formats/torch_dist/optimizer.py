"""Optimizer state in `torch_dist`, in each of Megatron's forms.

    optimizer.state.fp32_param.<key>    the plain optimizers, and the distributed one's `fully_sharded_model_space`
                                        (Megatron Core 0.8 to 0.14), whose tensors are stored flattened
    optimizer.state.param.<key>         the distributed optimizer's `fully_reshardable` (0.15 and later)
    optimizer.distributed.dp_group_..   its `dp_reshardable` (0.15 and later): flat buckets, see `buckets`; objects of
                                        its `dp_zero_gather_scatter`, see `gathered`

All have moments: Adam's `exp_avg` and `exp_avg_sq`, Lion's `exp_avg`, `momentum_buffer` of SGD and Muon.
`<key>` is the weight's own. Optimizers may be chained, one for the parameters of experts and one for all others, or
Muon for matrices and Adam for the rest: a form that is bound to its layout then has the prefix `chained_N.`.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from mcore_convert.errors import MappingError, UnreadableCheckpoint, fold
from mcore_convert.formats.base import Findings
from mcore_convert.formats.files import dcp
from mcore_convert.formats.megatron.module_buffers import Place
from mcore_convert.formats.megatron.remainders import are_gathered, whole_masters
from mcore_convert.formats.megatron.tolerances import refuse_remainders
from mcore_convert.formats.torch_dist import gathered as gathered_form
from mcore_convert.formats.torch_dist.buckets import BUCKET_KEY, BucketState
from mcore_convert.formats.torch_dist.keys import SlotsByPlace, StateKeys, with_fused_norms
from mcore_convert.formats.torch_dist.training import GROUP_KEY, sharding_types
from mcore_convert.spec import releases
from mcore_convert.spec.dims import Dims
from mcore_convert.spec.family import Item
from mcore_convert.spec.names import ADAM, BY_MOMENTUM, LION, MASTER, MOMENTS, MOMENTUM, OPTIMIZER_STATES
from mcore_convert.storage.joining import REMAINDER
from mcore_convert.storage.views import Slot

STATE_KEY = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(\w+)\.(.+)")
KINDS = {"param": MASTER, "fp32_param": MASTER} | {moment: moment for moment in MOMENTS}

UNREADABLE_TYPES = {
    "fully_sharded_bucket_space": "save it again with Megatron Core 0.8 or later, or",
    "fsdp_dtensor": "save it again without Megatron-FSDP, or",
}
WITHOUT = "leave the optimizer state behind with --no-optimizer"


@dataclass(frozen=True)
class NamedState:
    """Optimizer state under the names of the weights.

    Flattened state is `matched_by_order`: Megatron Core 0.8 to 0.14 fuses the experts of a local layer spec into one
    transposed parameter, flattens it, and stores only the shape. `gathered`: master copies are remainders in fp32.
    """

    weights: StateKeys
    by_state: Mapping[str, StateKeys]
    matched_by_order: bool
    gathered: bool = False

    @property
    def states(self) -> tuple[str, ...]:
        """States of every trained weight."""
        return tuple(state for state in OPTIMIZER_STATES if state in self.by_state)

    def keeps(self, item: Item, dims: Dims) -> bool:
        """Return whether the optimizer of a weight has a state."""
        if item.state not in MOMENTS:
            return True
        by_momentum = MOMENTUM in self.by_state and self.by_state[MOMENTUM].holds(item.weight, item.at)
        return item.state in (BY_MOMENTUM if by_momentum else self._others)

    @cached_property
    def _others(self) -> tuple[str, ...]:
        """Moments of a weight without a momentum of SGD or Muon; if there are no others, the momentum is missing."""
        return next((kept for kept in (ADAM, LION, BY_MOMENTUM) if kept[-1] in self.by_state), ())

    def locate(self, item: Item, dims: Dims, findings: Findings) -> list[Slot]:
        """Return the boxes of one state of one weight."""
        if item.state not in self.by_state:
            findings.missing.append(str(item))
            return []
        slots = self.by_state[item.state].locate(item.weight, item.at, dims, findings)
        if item.state != MASTER:
            return slots
        weights = partial(self.weights.locate, item.weight, item.at, dims, findings)
        return whole_masters(slots, weights, gathered=self.gathered)

    def replicas(self, item: Item, dims: Dims) -> Iterable[tuple[Slot, str]]:
        """Return nothing: every element is stored once."""
        return ()


@dataclass(frozen=True)
class ChainedState:
    """State of Muon under the names of the weights, chained with a distributed optimizer's in buckets for the rest.

    Megatron Core 0.19 chains them (`optimizer/__init__.py`, `_get_megatron_emerging_optimizer`). Muon's weights have a
    momentum: the matrices inside the layers, since 0.20 without `in_proj` of Mamba mixers (`mamba_mixer.py`).
    """

    named: NamedState
    buckets: BucketState
    matched_by_order = True

    @property
    def states(self) -> tuple[str, ...]:
        """States of either optimizer."""
        return tuple(state for state in OPTIMIZER_STATES if state in (*self.named.states, *self.buckets.states))

    def keeps(self, item: Item, dims: Dims) -> bool:
        """Return whether the optimizer of this weight keeps this state."""
        return self._of(item).keeps(item, dims)

    def locate(self, item: Item, dims: Dims, findings: Findings) -> list[Slot]:
        """Return the boxes of one state of one weight."""
        return self._of(item).locate(item, dims, findings)

    def replicas(self, item: Item, dims: Dims) -> Iterable[tuple[Slot, str]]:
        """Return the copies on other ranks, for state in buckets."""
        return self._of(item).replicas(item, dims)

    def _of(self, item: Item) -> NamedState | BucketState:
        return self.named if self.named.by_state[MOMENTUM].holds(item.weight, item.at) else self.buckets


OptimizerState = NamedState | BucketState | ChainedState


def find(
    directory: dcp.Directory,
    prefix: str,
    weights: StateKeys,
    keys: Iterable[str],
    common: Mapping[str, Any],
    reserved: Mapping[str, SlotsByPlace] | None = None,
) -> OptimizerState | None:
    """Return the optimizer state of a checkpoint; None if it has none.

    Args:
        prefix: prefix of all keys, from a wrapper around the model.
        keys: all keys of the optimizer.
        common: the common state.
        reserved: the slots of a reserved checkpoint.

    Raises:
        MappingError: a tensor is not a state of a weight; nothing is dropped silently.
        UnreadableCheckpoint: the form is not supported, or no order of the modules fits.
    """
    named: dict[str, dict[str, str]] = {}
    buckets: dict[Place, dict[str, str]] = {}
    gathered: dict[tuple[int, int], str] = {}
    unknown = []
    for on_disk in keys:
        key = on_disk.removeprefix(prefix)
        is_tensor = on_disk in directory.tensors
        if is_tensor and (state := STATE_KEY.fullmatch(key)) and state[1] in KINDS:
            named.setdefault(state[1], {})[state[2].removeprefix(prefix)] = on_disk
        elif is_tensor and (bucket := BUCKET_KEY.fullmatch(key)) and bucket["kind"] in KINDS:
            chain, group, buffer, number = (int(bucket[name] or 0) for name in ("chain", "group", "buffer", "bucket"))
            buckets.setdefault((chain, group, buffer, number), {})[bucket["kind"]] = on_disk
        elif is_tensor or not (matched := GROUP_KEY.fullmatch(key)):
            unknown.append(on_disk)
        elif matched[3] == gathered_form.STATE:
            gathered[int(matched[1] or 0), int(matched[2])] = on_disk
    _refuse_types(directory, common)
    if unknown:
        raise MappingError(
            f"{len(unknown)} keys of the optimizer in `{directory.path}` have no place in the state of a weight",
            items=fold(unknown),
            hint=f"only the states of Adam, Lion, SGD and Muon are known; {WITHOUT}",
        )
    if gathered and not buckets:
        directory, buckets = gathered_form.as_buckets(directory, gathered)
    elif gathered:
        raise UnreadableCheckpoint(f"`{directory.path}` holds optimizer state in two forms", hint=WITHOUT)
    if named and buckets and named.keys() != {"fp32_param", MOMENTUM}:
        raise UnreadableCheckpoint(f"`{directory.path}` holds optimizer state in two forms", hint=WITHOUT)
    if buckets:
        args = common.get("args")
        stored = dict(vars(args)) if isinstance(args, Namespace) else None
        if not named:
            return BucketState(directory, buckets, weights, stored)
        by_name = _named_state(directory, weights, named, reserved)
        return ChainedState(by_name, BucketState(directory, buckets, weights, stored, by_name.by_state[MOMENTUM]))
    if not named:
        return None
    by_name = _named_state(directory, weights, named, reserved)
    return by_name if reserved is not None else _with_remainders(by_name, common)


def _named_state(
    directory: dcp.Directory,
    weights: StateKeys,
    named: Mapping[str, Mapping[str, str]],
    reserved: Mapping[str, SlotsByPlace] | None,
) -> NamedState:
    if named.get("param", {}).keys() & named.get("fp32_param", {}).keys():
        raise UnreadableCheckpoint(f"`{directory.path}` holds two master copies of its weights", hint=WITHOUT)
    by_state = {}
    masters: dict[str, str] = {}
    strangers = []
    twice = named.get(MOMENTUM, {}).keys() & {key for moment in ADAM for key in named.get(moment, {})}
    if twice:
        raise MappingError(
            f"weights in `{directory.path}` have moments of two optimizers", items=fold(sorted(twice)), hint=WITHOUT
        )
    for kind, keys in named.items():
        keys = with_fused_norms(keys, weights.keys)
        strangers += [on_disk for key, on_disk in keys.items() if key not in weights.keys]
        if kind in ("param", "fp32_param"):  # Muon's master copies may have one kind of key, and the others another
            keys |= masters
            masters = keys
        by_state[KINDS[kind]] = StateKeys(directory, keys, f"optimizer.state.{kind}.", reserved)
    if strangers:
        raise MappingError(
            f"{len(strangers)} tensors of the optimizer in `{directory.path}` belong to no weight of its model",
            items=fold(strangers),
            hint=WITHOUT,
        )
    # Megatron Core 0.15 to 0.19 cuts `fully_reshardable` states at shifted places where a buffer has padding between
    # buckets (`sharded_param_state_fully_reshardable`), with a warning only: so masters are compared with the weights.
    return NamedState(weights, by_state, bool(directory.unflattened) or "param" in named)


def _with_remainders(state: NamedState, common: Mapping[str, Any]) -> NamedState:
    """Return the state, with master copies read as remainders if they were gathered as numbers.

    Raises:
        UnreadableCheckpoint: they were, at places that may be shifted (see `_named_state`), which cannot be detected.
    """
    masters = state.by_state.get(MASTER)
    args = vars(common["args"]) if isinstance(common.get("args"), Namespace) else {}
    if masters is None:
        return state
    if any(meta.dtype == REMAINDER for meta in masters.tensors.values()):
        refuse_remainders(args, masters.directory.path)
        return state
    if not are_gathered(args, (masters.slots(key)[0].view for key in masters.keys)):
        return state
    refuse_remainders(args, masters.directory.path)
    release = releases.of_run(args)
    if args.get("overlap_grad_reduce") and (release is None or release < releases.UNSHIFTED_STATE):
        raise UnreadableCheckpoint(
            f"the master weights in `{masters.directory.path}` are remainders that were gathered from several buckets",
            items=["Megatron Core up to 0.19 shifts it where buckets are padded, and remainders fit to any weight"],
            hint=f"save it again with `dp_reshardable` state, Megatron-LM's default, or {WITHOUT}",
        )
    return replace(state, gathered=True)


def _refuse_types(directory: dcp.Directory, common: Mapping[str, Any]) -> None:
    for kind in sorted(sharding_types(common) & UNREADABLE_TYPES.keys()):
        raise UnreadableCheckpoint(
            f"the optimizer state in `{directory.path}` has the form `{kind}`, which is not read",
            hint=f"{UNREADABLE_TYPES[kind]} {WITHOUT}",
        )
    is_flat = "fully_sharded_model_space" in sharding_types(common) and directory.flattens
    if is_flat and not directory.unflattened:
        raise UnreadableCheckpoint(
            f"the optimizer state in `{directory.path}` is flattened, and the shapes from before are not stored",
            hint=f"save it again with Megatron Core 0.8 or later, or {WITHOUT}",
        )
