"""Optimizer state of a rank as Megatron-LM saves it, with holes for its tensors: the inverse of `optimizer`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mcore_convert.errors import MappingError
from mcore_convert.formats.base import Training
from mcore_convert.formats.files.torch_tree import Hole
from mcore_convert.formats.megatron.modules import EXPERT
from mcore_convert.formats.mp_rank.parameters import (
    FLOAT16,
    Groups,
    Parameter,
    are_shared,
    bucket_size_of,
    buffer_starts,
    by_buffer,
    dealt_to,
    owned_by,
)
from mcore_convert.formats.mp_rank.rank_file import RankFile
from mcore_convert.spec.config.arguments import TorchDtype
from mcore_convert.spec.family import Weight
from mcore_convert.spec.layout import Rank
from mcore_convert.spec.releases import GROUPS_OF_ALL_RANKS, NEWEST, SORTED_GROUPS, Release
from mcore_convert.storage.views import TensorMeta


def groups_of(training: Training, weights: Iterable[Weight], *, apart: bool) -> list[Groups]:
    """Return the parameter groups of each chained optimizer. With expert parallelism, experts have their own optimizer.

    Args:
        apart: whether experts have their own in the run that will load the state, which may have another layout.
    """
    by_kind = training.chained_by_kind(apart=apart)
    if by_kind:
        return [*by_kind]
    dense = [group for group in training.groups if not group.get("is_expert_parallel")]
    experts = [group for group in training.groups if group.get("is_expert_parallel")]
    if not apart:
        return [dense or [{**group, "is_expert_parallel": False} for group in experts]]
    has_biases = any(
        weight.mcore is not None and EXPERT in weight.mcore and len(weight.shape) == 1 for weight in weights
    )
    own = [{**group, "is_expert_parallel": True} for group in dense if has_biases or group.get("wd_mult") != 0]
    return [dense, experts or own]


def optimizer_of(
    file: RankFile,
    chained: Sequence[Groups],
    training: Training,
    args: Mapping[str, Any],
    *,
    masters: bool,
    release: Release = NEWEST,
) -> Any:
    """Return the entry `optimizer` of a rank's file: a dict, or a list of dicts if optimizers are chained.

    Args:
        release: release of Megatron-LM, which determines the order of a rank's groups.
        masters: whether the optimizer has master copies; for a model in fp32 it has none.

    Raises:
        MappingError: there is no group for a parameter.
    """
    parts = []
    for parameters, every in zip(owned_by(file, chained), chained, strict=True):
        groups = every if release >= SORTED_GROUPS else _as_they_come(every, parameters, args, release)
        inner, copies = (
            _distributed(groups) if training.distributed else _plain(file, parameters, groups, training, args)
        )
        if not masters and not training.distributed:
            parts.append(inner)
            continue
        part: dict[str, Any] = {"optimizer": inner}
        if scaler := training.rest.get("grad_scaler"):
            part["grad_scaler"] = {**scaler, "scale": Hole.number(scaler["scale"], (1,))}
        if copies is not None:
            part["fp32_from_fp16_params"] = copies
        parts.append(part)
    return parts[0] if len(parts) == 1 else parts


def buffers_of(
    file: RankFile, rank: Rank, chained: Sequence[Groups], args: Mapping[str, Any], *, saves_dense: bool
) -> Any:
    """Return the content of `distrib_optim.pt`, for chained optimizers.

    Args:
        saves_dense: whether this rank saves the state of dense parameters: their data-parallel group spans the expert
            ranks, and only its first rank saves.
    """
    parts: list[Any] = []
    for which, parameters in enumerate(owned_by(file, chained)):
        if len(chained) > 1 and which == 0 and not saves_dense:
            parts.append(None)
            continue
        part: dict[Any, Any] = {"buckets_coalesced": True}
        for number, ((chunk, dtype), members) in enumerate(by_buffer(parameters).items()):
            bucketed = args.get("overlap_grad_reduce") and rank.pp == chunk == 0
            _, length = buffer_starts(
                [member.local.meta.numel for member in members],
                [are_shared(member, args) for member in members],
                bucket_size_of(args) if bucketed else None,
            )
            tensors: dict[str, Any] = {
                state: Hole(TensorMeta((length,), "float32")) for state in ("param", *members[0].local.moments)
            }
            gradients = dtype if args.get("accumulate_allreduce_grads_in_fp32") is False else "float32"
            part[number] = {(TorchDtype(dtype), TorchDtype(gradients)): {**tensors, "numel_unpadded": length}}
        parts.append(part)
    return parts[0] if len(parts) == 1 else parts


def _distributed(groups: Groups) -> tuple[dict[str, Any], list[list[Hole]] | None]:
    return {"param_groups": [dict(group) for group in groups]}, None


def _as_they_come(groups: Groups, parameters: list[Parameter], args: Mapping[str, Any], release: Release) -> Groups:
    """Return the groups in the order of their first parameters on this rank (`optimizer/__init__.py`,
    `_get_param_groups`).

    Megatron-LM up to 0.15 has this order and matches the groups of a file by position, so a later pipeline stage, whose
    first parameter is a norm, begins with the group without weight decay.
    """
    places = {parameter: place for place, parameter in enumerate(parameters)}
    dealt = dealt_to(groups, parameters, args)
    first = [min((places[member] for member in members), default=len(places)) for members in dealt]
    order = sorted(range(len(groups)), key=first.__getitem__)
    without = release < GROUPS_OF_ALL_RANKS  # groups without parameters are omitted
    return [groups[number] for number in order if dealt[number] or not without]


def _plain(
    file: RankFile, parameters: list[Parameter], groups: Groups, training: Training, args: Mapping[str, Any]
) -> tuple[dict[str, Any], list[list[Hole]]]:
    """Return torch's state dict, and the master copies of each group.

    torch counts steps per parameter; the fused optimizers of Apex and Transformer Engine count them per group.
    """
    dealt = dealt_to(groups, parameters, args)
    held = [parameter.name for members in dealt for parameter in members]
    without = [parameter.name for parameter in parameters if parameter.name not in held]
    if without or len(held) != len(parameters):
        raise MappingError(
            f"the optimizer has {len(groups)} groups, which do not deal out the parameters of `{file.name}`",
            items=without,
            hint="--no-optimizer converts the weights alone",
        )
    state: dict[int, dict[str, Any]] = {}
    stored = []
    copies = []
    for group, members in zip(groups, dealt, strict=True):
        keys = list(range(len(state), len(state) + len(members)))
        for key, member in zip(keys, members, strict=True):
            shape = member.local.view.shape
            counts = not training.steps_by_group and group.get("step") is not None
            step = {"step": Hole.number(group["step"])} if counts else {}
            state[key] = step | {moment: Hole(TensorMeta(shape, "float32")) for moment in member.local.moments}
        plain = {name: value for name, value in group.items() if training.steps_by_group or name != "step"}
        stored.append({**plain, "params": keys})
        halves = [member for member in members if member.local.view.dtype in FLOAT16]
        copies.append([Hole(TensorMeta(member.local.view.shape, "float32")) for member in halves])
    return {"state": state, "param_groups": stored}, copies
