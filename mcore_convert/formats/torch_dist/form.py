"""The form of written optimizer state: its keys, its chunks, and the versions that load it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from mcore_convert.formats.base import Training
from mcore_convert.formats.format import Resume
from mcore_convert.formats.megatron.param_groups import counts_steps
from mcore_convert.formats.torch_dist.checkpoint import NO_WEIGHT
from mcore_convert.formats.torch_dist.training import FULLY_RESHARDABLE, MODEL_SPACE
from mcore_convert.spec import releases
from mcore_convert.spec.family import Item, Weight
from mcore_convert.spec.names import MASTER, MOMENTUM, PARAM, Index, placeholders_of
from mcore_convert.spec.releases import Release

STATE_PREFIX = "optimizer.state."


@dataclass(frozen=True)
class Form:
    """Names and chunks of the optimizer's states.

    `name` is Megatron Core's name of a distributed optimizer's form. That of 0.8 to 0.14, MODEL_SPACE, has the names of
    plain optimizers, and flattened states. `chained`: keys begin with the number of the optimizer, as up to 0.13 if
    experts have their own (`optimizer.py`, `ChainedOptimizer`). `plain`: the weights of a plain optimizer that is
    chained with a distributed one.
    """

    distributed: bool
    name: str
    chained: bool
    plain: frozenset[tuple[Weight, Index]] = frozenset()

    @classmethod
    def of(cls, training: Training | None, args: Mapping[str, Any], release: Release, items: Collection[Item]) -> Form:
        distributed = training is not None and training.distributed
        apart = bool(args.get("num_experts")) and (args.get("expert_model_parallel_size") or 1) > 1
        name = FULLY_RESHARDABLE if release >= releases.FULLY_RESHARDABLE else MODEL_SPACE
        mixed = training is not None and training.is_chained_by_kind
        plain = frozenset((item.weight, item.at) for item in items if mixed and item.state == MOMENTUM)
        return cls(distributed, name, apart and release < releases.CHAINS_WITHOUT_PREFIX, plain)

    @property
    def is_flat(self) -> bool:
        """Whether states are stored flattened."""
        return self.distributed and self.name == MODEL_SPACE

    def flattens(self, key: str) -> bool:
        """Return whether a key is stored flattened."""
        return self.is_flat and NO_WEIGHT.match(key) is not None

    def prefix(self, item: Item) -> str:
        """Return the prefix of a weight's key in the key of one of its states."""
        if item.state == PARAM:
            return ""
        is_plain = not self.distributed or self.is_flat or (item.weight, item.at) in self.plain
        masters = "fp32_param" if is_plain else "param"
        number = int("expert" in placeholders_of(item.weight.mcore or ""))
        chain = f"chained_{number}." if self.chained else ""
        return f"{chain}{STATE_PREFIX}{masters if item.state == MASTER else item.state}."


def resume(training: Training, release: Release, args: Mapping[str, Any]) -> Resume:
    """Return Megatron-LM's arguments for a distributed optimizer's state, and a note on the versions that load it."""
    if not training.distributed:
        return Resume()
    since = releases.spelled(releases.FULLY_RESHARDABLE)
    if release >= releases.FULLY_RESHARDABLE:
        named = {"dist_ckpt_optim_fully_reshardable": True}
        form, which = FULLY_RESHARDABLE, f"Megatron-LM {since} and later load it, --for-megatron 0.14 is for older ones"
    else:
        named = {"ckpt_fully_parallel_save": True}  # in 0.12, this decides whether states have parameter names
        form, which = MODEL_SPACE, f"Megatron-LM up to {since} loads it, --for-megatron {since} is for newer ones"
    notes = [f"optimizer state is written as `{form}`: {which}"]
    if not any(map(counts_steps, training.groups)) and release < releases.LION:
        notes.append(f"Megatron-LM {releases.spelled(releases.LION)} and later load Lion's distributed state so")
    return Resume(named, tuple(notes))
