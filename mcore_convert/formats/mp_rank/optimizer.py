"""Optimizer state in rank files: matching its tensors to parameters.

Neither form names parameters. Plain optimizers number them group by group, in the order of the modules; the distributed
one has flat buffers in the reverse of that order. The order is that of the file's own `model`, so the modules need not
be known; every number and length must fit, and the master copies verify the rest (`Proof`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from mcore_convert.errors import MappingError, UnreadableCheckpoint, fold
from mcore_convert.formats.base import Training, is_by_momentum
from mcore_convert.formats.files import pickles
from mcore_convert.formats.files.torch_archive import scalar
from mcore_convert.formats.megatron.remainders import are_gathered
from mcore_convert.formats.mp_rank.parameters import (
    FLOAT16,
    Parameter,
    are_shared,
    bucket_size_of,
    buffer_starts,
    by_buffer,
    dealt_to,
    owned_by,
)
from mcore_convert.formats.mp_rank.rank_file import DISTRIBUTED_FILE, RankFile
from mcore_convert.spec.config import arguments
from mcore_convert.spec.names import ADAM, BY_MOMENTUM, LION, MASTER, MOMENTS
from mcore_convert.storage.views import TensorMeta, View

# Known entries of a file other than model and random states, under the names of all versions.
KNOWN = ("args", "checkpoint_version", "iteration", "total_iters", "optimizer", "opt_param_scheduler", "lr_scheduler")
RANDOM = ("rng_state", "random_rng_state", "np_rng_state", "torch_rng_state", "cuda_rng_state", "rng_tracker_states")
LAYER_WISE_FILES = "layer_wise_optimizer_*.pt"  # of Megatron Core's layer-wise optimizer, which distributes parameters
WHY_JOINED = "joins experts, as `GroupedMLP` of Megatron Core up to 0.16 did: only its weights are read"

# States of each parameter of a chunk, as views of the parameter's shape.
ChunkStates = Mapping[str, Mapping[str, View]]


class Proof(NamedTuple):
    """A master copy that must equal `param` when cast to its dtype."""

    master: View
    param: View
    where: str


@contextlib.contextmanager
def _as_damage(file: RankFile) -> Iterator[None]:
    """A scope in which errors of unexpected content in a rank's file become errors of damage."""
    try:
        yield
    except pickles.DAMAGE as error:
        raise UnreadableCheckpoint(
            f"the optimizer's state in `{file.path}` is damaged: {pickles.reason_of(error)}",
            hint="--no-optimizer converts the weights alone",
        ) from error


def states_in(file: RankFile) -> tuple[str, ...]:
    """Return the optimizer's states on a rank. A plain optimizer of an fp32 model has no master copies."""
    with _as_damage(file):
        return _states_in(file)


def _states_in(file: RankFile) -> tuple[str, ...]:
    parts = _parts(file.tree.get("optimizer"))
    if not any(parts):
        return ()
    if _is_distributed(parts):
        buffers = (part for part in _parts(file.distributed) if part is not None)
        tensors = [
            tensors for part in buffers for key in part if isinstance(key, int) for tensors in part[key].values()
        ]
        # missing or unknown forms are refused when the state itself is requested
        held = [moment for moment in MOMENTS if any(isinstance(each, dict) and moment in each for each in tensors)]
        return (MASTER, *(held or ADAM))
    held = [moment for moment in MOMENTS if any(moment in kept for part in parts for kept in _kept_in(part))]
    masters = [MASTER] if any(_masters(part) is not None for part in parts) else []
    return (*masters, *held) if held or any(_masters(part) for part in parts) else ()


def _kept_in(part: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield the names of a plain optimizer's tensors for each parameter."""
    for kept in _inner(part).get("state", {}).values():
        yield [name for name, value in kept.items() if isinstance(value, View) and name != "step"]


def training_of(file: RankFile) -> Training:
    """Return the state that a run needs to resume, from one rank's file."""
    with _as_damage(file):
        return _training_of(file)


def _training_of(file: RankFile) -> Training:
    parts = _parts(file.tree["optimizer"])
    iteration = file.iteration
    rest = arguments.plain({key: value for key, value in file.tree.items() if key not in KNOWN and key not in RANDOM})
    scalers = [part["grad_scaler"] for part in parts if part.get("grad_scaler")]
    if scalers:
        rest["grad_scaler"] = {key: _value(value) for key, value in scalers[0].items()}
    groups = [(number, group) for number, part in enumerate(parts) for group in _groups_with_steps(_inner(part))]
    return Training(
        iteration if isinstance(iteration, int) else 0,
        _is_distributed(parts),
        tuple(group for _, group in groups),
        not any("step" in state for part in parts for state in _inner(part).get("state", {}).values()),
        file.tree.get("opt_param_scheduler", file.tree.get("lr_scheduler")),
        rest,
        tuple(number for number, _ in groups),
    )


def find_states(file: RankFile, args: Mapping[str, Any]) -> tuple[ChunkStates, ...]:
    """Return the states of every parameter of a rank, by model chunk and name.

    Raises:
        MappingError: the optimizer's state does not fit the model's parameters.
        UnreadableCheckpoint: `distrib_optim.pt` is missing, or a file is damaged.
    """
    joined = {local.joined: None for chunk in file.chunks for local in chunk.values() if local.joined is not None}
    if joined:
        raise _refusal(file, [f"{key} {WHY_JOINED}" for key in fold(joined)])
    with _as_damage(file):
        return _find_states(file, args)


def _find_states(file: RankFile, args: Mapping[str, Any]) -> tuple[ChunkStates, ...]:
    parts = _parts(file.tree.get("optimizer"))
    states: tuple[dict[str, dict[str, View]], ...] = tuple({} for _ in file.chunks)
    parts_of_ranks = sorted(file.path.parent.glob(LAYER_WISE_FILES))
    if len(parts_of_ranks) > 1:
        raise _refusal(file, [f"each of {len(parts_of_ranks)} data-parallel ranks has a part: `{LAYER_WISE_FILES}`"])
    chained = [_inner(part).get("param_groups", []) for part in parts]
    if len(parts) > 2 * len({is_by_momentum(group) for groups in chained for group in groups}):
        raise _refusal(
            file, [f"{len(parts)} optimizers are chained; known are one of a kind, and one more for experts"]
        )
    owned = owned_by(file, chained)
    if _is_distributed(parts):
        buffers = _parts(file.distributed)
        if not buffers:
            raise UnreadableCheckpoint(
                f"`{file.path.parent}` has no `{DISTRIBUTED_FILE}`, which holds its optimizer's state",
                hint="the checkpoint was not copied completely; --no-optimizer does without",
            )
        if len(buffers) != len(parts):
            raise _refusal(file, [f"{DISTRIBUTED_FILE} is of {len(buffers)} optimizers, not of {len(parts)}"])
        for parameters, buffer in zip(owned, buffers, strict=True):
            if buffer is not None:  # only the first of the expert ranks saves the state of replicated parameters
                _assign(states, _in_buffers(file, parameters, buffer, args))
    else:
        for parameters, part in zip(owned, parts, strict=True):
            _assign(states, _in_groups(file, parameters, part, args))
    return states


def _parts(optimizer: Any) -> list[Any]:
    """Return the chained optimizers: stored as a list, in some versions as a dict by number; usually one."""
    if isinstance(optimizer, list):
        return optimizer
    if isinstance(optimizer, dict) and 1 in optimizer and "optimizer" in optimizer[1]:
        return [optimizer[number] for number in sorted(optimizer)]
    return [optimizer] if optimizer else []


def _inner(part: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return torch's state dict: the entry `optimizer` of a mixed precision optimizer, otherwise the dict itself."""
    inner = part.get("optimizer", part.get("optimizer_state_dict", part))
    if not isinstance(inner, dict):
        raise TypeError(f"there is a {type(inner).__name__} in an optimizer's place")
    return inner


def _masters(part: Mapping[str, Any]) -> Any:
    return part.get("fp32_from_fp16_params", part.get("fp32_from_fp16"))


def _is_distributed(parts: list[Any]) -> bool:
    """Return whether the state is in another file: the distributed optimizer has only its groups here."""
    return any(part and "state" not in _inner(part) and "param_groups" in _inner(part) for part in parts)


def _assign(states_of: Sequence[dict[str, dict[str, View]]], states: Iterable[tuple[Parameter, str, View]]) -> None:
    for parameter, state, view in states:
        states_of[parameter.chunk].setdefault(parameter.name, {})[state] = view


def _refusal(file: RankFile, items: Iterable[str]) -> MappingError:
    return MappingError(
        f"the optimizer's state of `{file.path.parent}` does not fit the model's parameters",
        items=items,
        hint="--no-optimizer converts the weights alone",
    )


def _in_groups(
    file: RankFile, parameters: list[Parameter], part: Mapping[str, Any], args: Mapping[str, Any]
) -> Iterator[tuple[Parameter, str, View]]:
    """Yield the states of a plain optimizer, which are numbered across its groups."""
    inner, masters = _inner(part), _masters(part)
    groups = inner.get("param_groups", [])
    dealt = dealt_to(groups, parameters, args)
    kept = {name for names in _kept_in(part) for name in names}
    if kept and not any(kept == {*known} for known in (ADAM, LION, BY_MOMENTUM)):
        raise _refusal(file, [f"`{name}` is kept of its parameters" for name in sorted(kept)])
    problems = [
        f"group {number} has {len(group['params'])} parameters, the model has {len(members)} of its kind"
        for number, (group, members) in enumerate(zip(groups, dealt, strict=True))
        if len(group["params"]) != len(members)
    ]
    if problems:
        raise _refusal(file, problems)
    for number, (group, members) in enumerate(zip(groups, dealt, strict=True)):
        halves = [member for member in members if member.local.view.dtype in FLOAT16]
        copies = [] if masters is None else list(masters[number])
        if masters is not None and len(copies) != len(halves):
            raise _refusal(file, [f"group {number} has {len(copies)} master copies for {len(halves)} parameters"])
        for member, copy in zip(halves, copies, strict=False):
            yield member, MASTER, _checked(file, member, MASTER, copy)
        for member, key in zip(members, group["params"], strict=True):
            for state in (moment for moment in MOMENTS if moment in kept):
                yield member, state, _checked(file, member, state, inner["state"].get(key, {}).get(state))


def _checked(file: RankFile, parameter: Parameter, state: str, view: Any) -> View:
    wanted = parameter.local.view.shape
    if not isinstance(view, View) or view.shape != wanted:
        actual = f"{list(view.shape)}" if isinstance(view, View) else "missing"
        raise _refusal(file, [f"`{state}` of {parameter.name} is {actual}, the parameter is {list(wanted)}"])
    return view


def _in_buffers(
    file: RankFile, parameters: list[Parameter], buffers: Mapping[Any, Any], args: Mapping[str, Any]
) -> Iterator[tuple[Parameter, str, View]]:
    """Yield the states of the distributed optimizer: one flat buffer per chunk and dtype, in order."""
    kinds = by_buffer(parameters)
    stored = [
        (dtypes[0].name if isinstance(dtypes, tuple) else str(dtypes), tensors)
        for number in sorted(key for key in buffers if isinstance(key, int))
        for dtypes, tensors in buffers[number].items()
    ]
    if [dtype for dtype, _ in stored] != [dtype for _, dtype in kinds]:
        raise _refusal(
            file,
            [
                f"{DISTRIBUTED_FILE} has buffers for {', '.join(dtype for dtype, _ in stored) or 'nothing'}",
                f"the model chunks have parameters in {', '.join(dtype for _, dtype in kinds)}",
            ],
        )
    for members, (_, tensors) in zip(kinds.values(), stored, strict=True):
        yield from _in_buffer(file, members, tensors, args)


def _in_buffer(
    file: RankFile, members: list[Parameter], tensors: Any, args: Mapping[str, Any]
) -> Iterator[tuple[Parameter, str, View]]:
    kept = [key for key, tensor in tensors.items() if isinstance(tensor, View)] if isinstance(tensors, dict) else []
    if not any({*kept} == {"param", *known} for known in (ADAM, LION, BY_MOMENTUM)):
        raise _refusal(
            file,
            [f"{DISTRIBUTED_FILE} is not of one tensor for each state, as Megatron-LM writes it since February 2024"],
        )
    views = {MASTER if key == "param" else key: tensors[key] for key in kept}
    length = views[MASTER].shape[0]
    fitting = _fitting_starts([member.local.meta.numel for member in members], members, length, args)
    if not fitting or any(view.shape != (length,) for view in views.values()):
        raise _refusal(file, [f"a buffer has {length} elements, which is not what {len(members)} parameters take"])
    starts, *others = fitting
    if others and are_gathered(args, [views[MASTER]]):
        raise _refusal(
            file,
            ["a buffer fits two ways of cutting buckets, and master weights kept as remainders do not tell which"],
        )
    for member, start in zip(members, starts, strict=True):
        for state, view in views.items():
            meta = TensorMeta(member.local.view.shape, view.dtype)
            yield member, state, View.of(view.path, view.offset + start * view.itemsize, meta)


def _fitting_starts(
    sizes: list[int], members: list[Parameter], length: int, args: Mapping[str, Any]
) -> list[list[int]]:
    """Return the offsets of the parameters, for each way of cutting buckets that gives a buffer of this length."""
    alone = [are_shared(member, args) for member in members]
    cuts = [None, bucket_size_of(args)]
    fitting: list[list[int]] = []
    for cut in reversed(cuts) if args.get("overlap_grad_reduce") else cuts:
        starts, end = buffer_starts(sizes, alone, cut)
        if end == length and starts not in fitting:
            fitting.append(starts)
    return fitting


def _groups_with_steps(inner: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the groups without their parameters, but with the number of steps, which torch keeps per parameter."""
    for group in inner.get("param_groups", []):
        plain = {key: value for key, value in group.items() if key != "params"}
        members = [inner.get("state", {}).get(key, {}) for key in group.get("params", [])]
        steps = [member["step"] for member in members if "step" in member]
        if steps:
            plain["step"] = _value(steps[0])
        elif "step" in plain:
            plain["step"] = _value(plain["step"])
        yield plain


def _value(value: Any) -> Any:
    return scalar(value) if isinstance(value, View) else value
