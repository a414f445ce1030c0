"""The optimizer's tensors under Megatron Core's names in a checkpoint, each rank with the elements that it holds.

    optimizer.state.param.<key>         master copies of the distributed optimizer (`fully_reshardable`)
    optimizer.state.fp32_param.<key>    master copies of the plain optimizer for bf16 and fp16
    optimizer.state.exp_avg.<key>       and exp_avg_sq, or momentum_buffer of SGD

The distributed optimizer holds a range of each flattened parameter. Megatron Core 0.16.1 gathers all of them over the
data-parallel ranks before it saves them, and cuts the result wrongly: `get_parameter_state_dp_zero` packs the buckets
of a buffer without the padding between them, and `sharded_param_state_fully_reshardable` reads them at their offsets
with it (`distrib_optimizer.py:1106` and `:1478`), so that all buckets but the first are shifted. Here nothing
is gathered: a range is at most a part of a row, whole rows and a part of a row, and each is a chunk of the tensor. The
format on the disk is the same, and a rank that loads reads what it holds, in place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mcore_convert.errors import ConfigError
from mcore_convert.formats.megatron.flat import boxes_of_range
from train_entry.optimizer.torch_adam import allocate

PREFIX = "optimizer.state."
MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
FULLY_RESHARDABLE = "fully_reshardable"


@dataclass(frozen=True)
class Held:
    """Part of a parameter's state on this rank: elements `start` to `stop` of the flattened parameter.

    `main` is the tensor that the optimizer steps; `distributed`: no other data-parallel rank holds these elements.
    """

    parameter: Tensor
    main: Tensor
    start: int
    stop: int
    distributed: bool
    state: dict[str, Any]

    @property
    def has_master(self) -> bool:
        """Whether `main` is a copy, not the parameter itself or a part of it."""
        return self.main.untyped_storage().data_ptr() != self.parameter.untyped_storage().data_ptr()


def optimizers_of(optimizer: Any) -> list[Any]:
    """Return the optimizers of a chain: one for parameters of experts spread over ranks, one for all others."""
    chain: list[Any] = getattr(optimizer, "chained_optimizers", [optimizer])
    return [each for each in chain if not getattr(each, "is_stub_optimizer", False)]


def is_distributed(optimizer: Any) -> bool:
    """Return whether one optimizer of the chain is Megatron's distributed one."""
    return hasattr(optimizer, "model_param_group_index_map")


def held(optimizer: Any) -> Iterator[Held]:
    """Yield the parts on this rank of the state of one optimizer of the chain. Missing state is created."""
    inner = optimizer.optimizer
    _allocate(inner)
    if is_distributed(optimizer):
        for parameter, (group, order) in optimizer.model_param_group_index_map.items():
            span = optimizer._get_model_param_range_map(parameter)["param"]
            main = inner.param_groups[group]["params"][order]
            yield Held(parameter, main, span.start, span.end, True, inner.state[main])
    elif hasattr(optimizer, "float16_groups"):
        for group, mains in zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True):
            for parameter, main in zip(group, mains, strict=True):
                yield Held(parameter, main, 0, main.numel(), False, inner.state[main])
        for group in optimizer.fp32_from_fp32_groups:
            for parameter in group:
                yield Held(parameter, parameter, 0, parameter.numel(), False, inner.state[parameter])
    else:
        for group in inner.param_groups:
            for parameter in group["params"]:
                yield Held(parameter, parameter, 0, parameter.numel(), False, inner.state[parameter])


def steps_of(optimizer: Any) -> float:
    """Return the step count of one optimizer of the chain: torch counts steps per parameter, Apex per group."""
    inner = optimizer.optimizer
    counted = [state["step"] for state in inner.state.values() if "step" in state]
    counted = counted or [group["step"] for group in inner.param_groups if "step" in group]
    return float(counted[0]) if counted else 0.0


def set_steps(optimizer: Any, steps: float) -> None:
    """Set the step count of one optimizer of the chain."""
    inner = optimizer.optimizer
    for state in inner.state.values():
        if "step" in state:
            state["step"].fill_(steps)
    if not isinstance(inner, torch.optim.Adam | torch.optim.SGD):
        for group in inner.param_groups:
            group["step"] = int(steps)


def tensors_of(
    optimizer: Any, entries: Mapping[Tensor, Any], master_key: Callable[[Held, str], str | None]
) -> dict[str, Any]:
    """Return Megatron's `ShardedTensor`s of the chain's state on this rank; their data is the state itself.

    Args:
        entries: the saved form of each of the model's parameters (`entries_of`).
        master_key: the key of the master copy of a parameter that has this key; None for none.
    """
    tensors: dict[str, Any] = {}
    for each in optimizers_of(optimizer):
        for part in held(each):
            for source in _built(entries[part.parameter]):
                key = master_key(part, source.key)
                named = {} if key is None else {key: part.main}
                named |= {f"{PREFIX}{name}.{source.key}": part.state[name] for name in MOMENTS if name in part.state}
                for name, tensor in named.items():
                    for box in _boxes(part, source, name, tensor.detach().view(-1)):
                        tensors[f"{name}@{len(tensors)}"] = box
    return tensors


def own_master_key(part: Held, key: str) -> str | None:
    """Return Megatron Core's key of a master copy; the distributed optimizer stores fp32 parameters, too."""
    if part.distributed:
        return f"{PREFIX}param.{key}"
    return f"{PREFIX}fp32_param.{key}" if part.has_master else None


def common_of(optimizer: Any) -> dict[Any, Any]:
    """Return Megatron Core's common state for a chain of optimizers, in the form of each optimizer."""
    stored = [_common_of(each) for each in optimizers_of(optimizer)]
    return stored[0] if len(stored) == 1 else dict(enumerate(stored))


def entries_of(models: Iterable[Mapping[str, Any]]) -> dict[Tensor, Any]:
    """Return each parameter's `ShardedTensor`, or factory of several, in the sharded state dicts of model chunks."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    values = (value for model in models for value in model.values())
    return {value.data: value for value in values if isinstance(value, ShardedTensor | ShardedTensorFactory)}


def _allocate(inner: Any) -> None:
    """Create the state that the optimizer would create with its first step."""
    if isinstance(inner, torch.optim.Adam):
        allocate(inner)
        return
    for group in inner.param_groups:
        names = ("momentum_buffer",) if isinstance(inner, torch.optim.SGD) else ("exp_avg", "exp_avg_sq")
        if isinstance(inner, torch.optim.SGD) and not group["momentum"]:
            continue
        for main in group["params"]:
            for name in names:
                if inner.state[main].get(name) is None:
                    inner.state[main][name] = torch.zeros_like(main, requires_grad=False)


def _common_of(optimizer: Any) -> dict[str, Any]:
    steps = steps_of(optimizer)
    groups = [
        {name: value for name, value in group.items() if name != "params"} for group in optimizer.optimizer.param_groups
    ]
    scaler = getattr(optimizer, "grad_scaler", None)
    scale = {} if scaler is None else {"grad_scaler": _on_host(scaler.state_dict())}
    if is_distributed(optimizer):
        inner = {"param_groups": [{**group, "step": steps} for group in groups]}
        return {"optimizer": inner, **scale, "param_state_sharding_type": FULLY_RESHARDABLE}
    counts = any("step" in state for state in optimizer.optimizer.state.values())
    plain = {"state": {"common_step": torch.tensor(steps)} if counts else {}, "param_groups": groups}
    return {"optimizer": plain, **scale} if hasattr(optimizer, "float16_groups") else plain


def _on_host(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.cpu() if isinstance(value, Tensor) else value for name, value in state.items()}


def _built(entry: Any) -> list[Any]:
    """Return the `ShardedTensor`s of a saved parameter, their data parts of the parameter: two for a gated MLP."""
    built = entry.build() if hasattr(entry, "build") else [entry]
    return list(built.values()) if isinstance(built, dict) else built


def _boxes(part: Held, source: Any, key: str, flat: Tensor) -> Iterator[Any]:
    """Yield the chunks of one tensor of the state that lie within `source`, a `ShardedTensor` of the parameter.

    Args:
        flat: elements `part.start` to `part.stop`.

    Raises:
        ConfigError: the model saves the parameter transposed, as no trained module of Megatron Core does here.
    """
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    if not source.data.is_contiguous():
        raise ConfigError(f"`{source.key}` is saved in another order than it has: its optimizer state has no place")
    first = source.data.storage_offset() - part.parameter.storage_offset()
    low, high = max(part.start, first), min(part.stop, first + source.data.numel())
    lead = (1,) * source.prepend_axis_num
    shape = (*lead, *source.local_shape)
    for box, at in boxes_of_range(shape, low - first, high - first) if low < high else ():
        begin = first + at - part.start
        yield ShardedTensor(
            key,
            flat[begin : begin + math.prod(box.sizes)].view(box.sizes),
            flat.dtype,
            box.sizes,
            source.global_shape,
            tuple(offset + inside for offset, inside in zip(source.global_offset, box.offsets, strict=True)),
            None,  # no grid: the part of a rank may end anywhere
            _replica(part, source),
            allow_shape_mismatch=source.allow_shape_mismatch,
        )


def _replica(part: Held, source: Any) -> tuple[int, ...]:
    """Return the index of the copy, over pipeline, tensor and data-parallel ranks: the first is saved."""
    replica: tuple[int, ...] = source.replica_id
    return (*replica[:-1], 0) if part.distributed else replica
