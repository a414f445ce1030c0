"""Loading of a `torch_dist` checkpoint of this project, written at any layout: every rank reads what it holds."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from mcore_convert.errors import MappingError, UnreadableCheckpoint, counted, fold
from mcore_convert.formats.torch_dist.checkpoint import TorchDistCheckpoint
from mcore_convert.megatron.checkpoint import take_expert_norms
from mcore_convert.storage.views import TensorMeta
from train_entry.checkpoints import optimizer_state, random_state
from train_entry.checkpoints.contents import bare, layout_of, sharded_models
from train_entry.checkpoints.optimizer_state import PREFIX, Held
from train_entry.checkpoints.ranks import Ranks
from train_entry.checkpoints.writer import reason_of
from train_entry.state import TrainState

MASTERS = ("param.", "fp32_param.")


def load(state: TrainState, stored: TorchDistCheckpoint, ranks: Ranks, *, training: bool) -> list[str]:
    """Load the model and, with `training`, the rest of a run's state; return notes to the user.

    Args:
        stored: the checkpoint, open on each rank.

    Raises:
        ConvertError: the checkpoint does not fit the model, or cannot be read; on every rank. If it does not fit,
            nothing is changed.
    """
    carries = training and bool(stored.optimizer_keys)
    request: dict[str, Any] = dict(sharded_models(state.model))
    take_expert_norms(request, stored.directory.tensors)
    _drop_extra_states(request, stored)
    entries = optimizer_state.entries_of(request.values())
    _prefer_masters(request, stored)
    if carries:
        request["optimizer_state"] = optimizer_state.tensors_of(state.optimizer, entries, _master_key(stored))
    same_layout = layout_of(state.args) == layout_of(stored.common.args or {})
    takes_streams = training and same_layout and any(key.startswith("rng_state/") for key in stored.directory.objects)
    if takes_streams:
        request["rng_state"] = random_state.sharded(is_loading=True)
    ranks.every(lambda: _refuse_unfit(request, stored))
    notes = []
    loaded = _load(request, stored, ranks)
    for number, chunk in enumerate(state.model):
        # the weights are loaded in place already; this loads the extra states of modules
        bare(chunk).load_state_dict(loaded["model" if len(state.model) == 1 else f"model{number}"], strict=False)
    if carries:
        _take_up_optimizer(state, loaded["optimizer"])
    else:
        state.optimizer.reload_model_params()
    if training:
        notes += _take_up_run(state, stored, carries=carries)
    if takes_streams:
        ranks.every(lambda: random_state.restore(loaded["rng_state"]))
    elif training:
        notes.append("random streams start anew: they belong to the layout that the checkpoint was written at")
    return notes


def _load(request: dict[str, Any], stored: TorchDistCheckpoint, ranks: Ranks) -> dict[str, Any]:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.core import CheckpointingException

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of torch, about its own classes and names
            loaded: dict[str, Any] = dist_checkpointing.load(request, str(stored.path), validate_access_integrity=False)
    except (CheckpointException, CheckpointingException, OSError, RuntimeError) as error:
        raise ranks.once(UnreadableCheckpoint(f"`{stored.path}` cannot be loaded: {reason_of(error)}")) from error
    return loaded


def _master_key(stored: TorchDistCheckpoint) -> Callable[[Held, str], str | None]:
    """Return the function that finds the key of a parameter's master copy, whichever optimizer wrote it: that of its
    own tensor, or of the weight.
    """

    def key_of(part: Held, key: str) -> str | None:
        return (_stored_master(stored, key) or key) if part.has_master else None

    return key_of


def _stored_master(stored: TorchDistCheckpoint, key: str) -> str | None:
    """Return the key of a weight's master copy; None if the checkpoint has none."""
    keys = (f"{PREFIX}{master}{key}" for master in MASTERS)
    return next((each for each in keys if each in stored.directory.tensors), None)


def _prefer_masters(request: Mapping[str, Any], stored: TorchDistCheckpoint) -> None:
    """Load fp32 weights from the master copies of a run that was not in fp32, since its weights are rounded."""
    for model in request.values():
        for name, entry in model.items():
            there = stored.directory.tensors.get(entry.key)
            master = _stored_master(stored, entry.key)
            if master and there and there.dtype != "float32" and entry.data.dtype == torch.float32:
                model[name] = replace(entry, key=master)


def _drop_extra_states(request: dict[str, Any], stored: TorchDistCheckpoint) -> None:
    """Request the extra states of modules (the scales of FP8) only if the checkpoint has them."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    for model in request.values():
        for name, value in list(model.items()):
            if isinstance(value, ShardedObject) and value.unique_key not in stored.directory.objects:
                del model[name]


def _refuse_unfit(request: Mapping[str, Any], stored: TorchDistCheckpoint) -> None:
    """Prove that the checkpoint has every requested tensor, in the same size.

    Raises:
        MappingError: names all that it lacks.
    """
    tensors = stored.directory.tensors
    missing, misshapen = [], []
    for part in _tensors(request):
        there = tensors.get(part.key)
        if there is None:
            missing.append(part.key)
        elif not _fits(part, there):
            misshapen.append(f"{part.key}: {list(there.shape)}, where the model has {list(part.global_shape)}")
    if missing or misshapen:
        items = [*(f"missing: {key}" for key in fold(missing)), *dict.fromkeys(misshapen)]
        raise MappingError(
            f"`{stored.path}` does not fit the model: {counted(len(items), 'tensor differs', 'tensors differ')}",
            items=items,
        )


def _fits(part: Any, there: TensorMeta) -> bool:
    """Return whether a stored shape fits; the vocabulary may be padded to another number of rows."""
    here = tuple(part.global_shape)
    return here[1:] == there.shape[1:] and (part.allow_shape_mismatch or here == there.shape)


def _tensors(request: Mapping[str, Any]) -> Iterator[Any]:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    for group in request.values():
        for entry in group.values() if isinstance(group, dict) else ():
            built = entry.build() if hasattr(entry, "build") else [entry]
            for part in built.values() if isinstance(built, dict) else built:
                if isinstance(part, ShardedTensor):
                    yield replace(part, data=None)


def _take_up_optimizer(state: TrainState, stored: Mapping[Any, Any]) -> None:
    """Restore the optimizer's state other than tensors. Its hyperparameters stay those of the configuration.

    Args:
        stored: the common state of the optimizer, or of each of a chain.
    """
    parts = [stored[number] for number in sorted(stored)] if 0 in stored else [stored]
    inner = [part.get("optimizer", part) for part in parts]
    groups = [group for part in inner for group in part.get("param_groups", ())]
    steps = [part["state"]["common_step"] for part in inner if "common_step" in part.get("state", ())]
    steps = steps or [group["step"] for group in groups if group.get("step") is not None]
    for each in optimizer_state.optimizers_of(state.optimizer):
        optimizer_state.set_steps(each, float(steps[0]) if steps else 0.0)
        scaler = getattr(each, "grad_scaler", None)
        if scaler is not None and parts[0].get("grad_scaler"):
            scaler.load_state_dict(parts[0]["grad_scaler"])


def _take_up_run(state: TrainState, stored: TorchDistCheckpoint, *, carries: bool) -> list[str]:
    """Restore the progress of the run; return its differences from the run that wrote the checkpoint."""
    args, common = stored.common.args or {}, stored.common.state
    state.iteration = stored.common.iteration or 0
    state.consumed_samples = int(args.get("consumed_train_samples") or 0)
    state.num_floating_point_operations = int(common.get("num_floating_point_operations_so_far") or 0)
    notes = [] if carries else ["the checkpoint has no optimizer state: its moments start anew"]
    there = common.get("opt_param_scheduler")
    if there is None:
        return notes
    here = state.scheduler.state_dict()
    changed = [
        f"{name} {there[name]} -> {value}"
        for name, value in here.items()
        if name != "num_steps" and name in there and there[name] != value
    ]
    if changed:
        notes.append(f"the schedule is the configuration's, not the checkpoint's: {', '.join(changed)}")
    state.scheduler.num_steps = 0
    state.scheduler.step(increment=int(there["num_steps"]))
    return notes
