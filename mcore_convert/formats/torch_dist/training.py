"""The optimizer's state in `torch_dist` other than tensors: parameter groups, steps, loss scale, scheduler.

Forms that can be resharded have it in the common state; a form that is bound to its layout has one object per
data-parallel group (Megatron Core 0.8 to 0.19, `optimizer.py` and `distrib_optimizer.py`, `sharded_state_dict`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from mcore_convert.formats.base import Training, is_by_momentum
from mcore_convert.formats.files import dcp
from mcore_convert.formats.files.torch_archive import scalar
from mcore_convert.formats.megatron.param_groups import counts_steps, identifiers_of, step_of
from mcore_convert.spec.config import arguments
from mcore_convert.spec.family import Item
from mcore_convert.spec.names import EXP_AVG_SQ, MASTER, placeholders_of
from mcore_convert.storage.views import View

GROUP_KEY = re.compile(r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.(\w+)/shard_0_1")
FULLY_RESHARDABLE, MODEL_SPACE = "fully_reshardable", "fully_sharded_model_space"

# Entries with a field of their own in `Training`, or that describe the form and not the run.
NOT_REST = ("args", "checkpoint_version", "iteration", "optimizer", "opt_param_scheduler", "content_metadata")


def sharding_types(common: Mapping[str, Any]) -> set[str]:
    """Return the stored names of the distributed optimizers' forms; empty for plain ones and before 0.8."""
    types = [(common.get("content_metadata") or {}).get("distrib_optim_sharding_type")]
    types += [each.get("param_state_sharding_type") for each in _optimizers(common)]
    return {each for each in types if isinstance(each, str)}


def training_of(directory: dcp.Directory, prefix: str, keys: Collection[str], common: Mapping[str, Any]) -> Training:
    """Return the state that a run needs to resume.

    Args:
        prefix: prefix of all keys, from a wrapper around the model.
        keys: all keys of the optimizer.
        common: the common state.

    Raises:
        UnreadableCheckpoint: there are no parameter groups, or they have different numbers of steps.
    """
    by_chain: dict[int, dict[str, Any]] = {}
    for on_disk in sorted(keys, key=_natural):
        matched = GROUP_KEY.fullmatch(on_disk.removeprefix(prefix))
        if matched is not None and matched[3] in ("optimizer", "grad_scaler"):
            content = directory.object(on_disk)
            if isinstance(content, list) and len(content) == 1:  # a sharded object is saved as a list of one
                (content,) = content
            _add_rank(by_chain.setdefault(int(matched[1] or 0), {}), matched[3], content)
    groups: list[dict[str, Any]] = []
    chain: list[int] = []
    by_group = True
    rest = arguments.plain({name: value for name, value in common.items() if name not in NOT_REST})
    optimizers = {**dict(enumerate(_optimizers(common))), **by_chain}
    for number, optimizer in sorted(optimizers.items()):
        inner = optimizer.get("optimizer", optimizer)
        state = inner.get("state")
        step = state.get("common_step") if isinstance(state, dict) else None
        for group in inner.get("param_groups", ()):
            groups.append({name: _value(value) for name, value in group.items() if name != "params"})
            chain.append(number)
            if step is not None:
                groups[-1]["step"], by_group = _value(step), False
        if optimizer.get("grad_scaler"):
            rest["grad_scaler"] = {name: _value(value) for name, value in optimizer["grad_scaler"].items()}
    step = step_of(groups, directory.path, counted=any(EXP_AVG_SQ in key for key in keys))
    counted = {} if step is None else {"step": step}
    iteration, scheduler = common.get("iteration"), common.get("opt_param_scheduler")
    return Training(
        iteration if isinstance(iteration, int) else 0,
        bool(sharding_types(common)),
        tuple({**group, **counted} if counts_steps(group) else group for group in groups),
        by_group,
        {name: _value(value) for name, value in scheduler.items()} if isinstance(scheduler, dict) else None,
        rest,
        tuple(chain),
    )


def _optimizers(common: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the entries of the common state for each optimizer: one, or several that are chained."""
    stored = common.get("optimizer")
    if not isinstance(stored, dict):
        return []
    chained = stored and all(isinstance(key, int) for key in stored)
    return [stored[key] for key in sorted(stored)] if chained else [stored]


def _add_rank(optimizer: dict[str, Any], name: str, content: Any) -> None:
    """Add the parameter groups of a further data-parallel group that are not known yet."""
    if name != "optimizer":
        optimizer.setdefault(name, content)
        return
    groups = optimizer.setdefault("optimizer", {"param_groups": []})["param_groups"]
    known = [(identifiers_of(group), group.get("step")) for group in groups]
    for group in content.get("param_groups", ()):
        if (identifiers_of(group), group.get("step")) not in known:
            groups.append(group)


def _natural(key: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", key)]


def _value(value: Any) -> Any:
    """Return a number that may be stored as a tensor."""
    return scalar(value) if isinstance(value, View) else value


def common_of(
    training: Training, args: Mapping[str, Any], items: Collection[Item], form: str, *, scale: Any = None
) -> dict[str, Any]:
    """Return the entries of Megatron Core's common state for an optimizer whose form can be resharded.

    Args:
        form: form of the distributed optimizer's state, FULLY_RESHARDABLE or MODEL_SPACE.
        args: arguments of the run that will load it: experts that are distributed over ranks have their own optimizer.
        items: the model's tensors. A plain optimizer without master copies is that of an fp32 model.
        scale: placeholder of the loss scale of fp16, which has to be a tensor.
    """
    has_masters = any(item.state == MASTER for item in items)
    has_expert_biases = any("expert" in placeholders_of(w.mcore or "") and len(w.shape) == 1 for w, _, _ in items)
    metadata: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if training.distributed:
        metadata["distrib_optim_sharding_type"] = form
        if form == FULLY_RESHARDABLE:
            metadata["distrib_optim_fully_reshardable_mem_efficient"] = False
    rest = dict(training.rest)
    scaler = rest.pop("grad_scaler", None)
    optimizers = []
    for groups in _chained(training, args, has_expert_biases):
        optimizer = _optimizer(groups, training, form, has_masters)
        if scaler is not None and (has_masters or training.distributed):
            optimizer["grad_scaler"] = {**scaler, "scale": scale}
        optimizers.append(optimizer)
    scheduler = {} if training.scheduler is None else {"opt_param_scheduler": dict(training.scheduler)}
    chained = optimizers[0] if len(optimizers) == 1 else dict(enumerate(optimizers))
    return {**rest, "optimizer": chained, **scheduler, "content_metadata": metadata}


def _optimizer(groups: Sequence[Mapping[str, Any]], training: Training, form: str, has_masters: bool) -> dict[str, Any]:
    if training.distributed and not (training.is_chained_by_kind and any(map(is_by_momentum, groups))):
        inner = {"param_groups": [dict(group) for group in groups]}
        return {"optimizer": inner, "param_state_sharding_type": form}
    # torch's Adam counts steps per parameter, and Megatron stores their common number; Apex and Transformer Engine
    # count per group, and would refuse it
    steps = [group["step"] for group in groups if counts_steps(group)]
    counted = {"common_step": steps[0]} if steps and not training.steps_by_group else {}
    without = "step" if counted else None
    plain = {
        "state": counted,
        "param_groups": [{name: value for name, value in group.items() if name != without} for group in groups],
    }
    return {"optimizer": plain} if has_masters else plain


def _chained(training: Training, args: Mapping[str, Any], has_expert_biases: bool) -> list[list[Mapping[str, Any]]]:
    """Return the groups of each optimizer (Megatron Core, `optimizer/__init__.py`, `get_megatron_optimizer`)."""
    apart = bool(args.get("num_experts")) and (args.get("expert_model_parallel_size") or 1) > 1
    by_kind = training.chained_by_kind(apart=apart)
    if by_kind:
        return by_kind
    groups = training.groups
    dense = [group for group in groups if not group.get("is_expert_parallel")]
    experts = [group for group in groups if group.get("is_expert_parallel")]
    is_split = args.get("overlap_param_gather_with_optimizer_step")  # the first model chunk has its own optimizer
    chain = [dense, dense] if is_split else [dense]
    if not apart:
        return chain
    if not experts:
        alike = [group for group in dense if not group.get("is_decoupled_lr") and group.get("lr_mult", 1.0) == 1.0]
        decayed = [group for group in alike if group.get("wd_mult", 1.0) != 0.0 or has_expert_biases]
        experts = [{**group, "is_expert_parallel": True} for group in decayed]
    return [*chain, experts]
