"""Finding the `torch_dist` checkpoint inside the directories of other programs.

    RUN/step_10/policy/weights/iter_0000000                     NeMo-RL
    RUN/global_step_10/actor/{dist_ckpt, huggingface}           verl up to 0.7
    RUN/global_step_10/actor/{model,optimizer,extra}/dist_ckpt  verl 0.8 and later (`utils/megatron_utils.py`)
    NAME/{weights, context}                                     NeMo 2 (`lightning/ckpt_utils.py`)

verl stores a model's weights in Megatron's form, in that of Hugging Face, or in both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from mcore_convert.formats.files import dcp
from mcore_convert.formats.megatron.recorded import (
    CONTENTS,
    CONTEXT,
    DIST,
    HUGGING_FACE,
    STEP,
    TRANSFORMER_CONFIG,
    WEIGHTS,
)
from mcore_convert.formats.megatron.run_directory import TRACKER, parse_tracker
from mcore_convert.formats.torch_dist.common_state import COMMON_STATE, OF_OPTIMIZER
from mcore_convert.spec.gpt import EMBEDDING, FINAL_NORMS

POLICY, ACTOR, MODEL, OPTIMIZER = "policy", "actor", "model", "optimizer"


def inner_directory(path: Path) -> Path | None:
    """Return the directory of the checkpoint inside another program's directory; None for any other path."""
    if not path.is_dir():
        return None
    for weights in (path / POLICY / WEIGHTS, path / WEIGHTS):
        if (weights / TRACKER).is_file() or (weights.is_dir() and (weights.parent / CONTEXT).is_dir()):
            return weights
    return next((inner for role in _roles(path) if (inner := _of_role(role)) is not None), None)


def _roles(path: Path) -> Iterator[Path]:
    """Yield directories that may be those of a model that verl trains, given a model, a step, or a run."""
    step = path
    if (path / TRACKER).is_file() and any(STEP.fullmatch(each.name) for each in path.iterdir()):
        latest = parse_tracker(path / TRACKER).removeprefix("iter_")
        if latest.isdecimal():
            step = path / f"global_step_{int(latest)}"
    yield step
    yield step / ACTOR


def _of_role(role: Path) -> Path | None:
    """Return the model of a role: in Megatron's form if present, since that may include the optimizer."""
    is_role = any((role / name).is_file() for name in (TRANSFORMER_CONFIG, CONTENTS))
    if not is_role and not any((role / name).is_dir() for name in (DIST, f"{MODEL}/{DIST}")):
        return None
    folders = [folder for folder in (role / MODEL, role) if folder.is_dir()]
    exported = [folder / HUGGING_FACE for folder in folders if any((folder / HUGGING_FACE).glob("*.safetensors"))]
    for folder in folders:
        if dcp.exists(folder / DIST) and (not exported or has_model(dcp.read(folder / DIST))):
            return folder / DIST
    return exported[0] if exported else None


def has_model(directory: dcp.Directory) -> bool:
    """Return whether a directory holds weights, and not only optimizer or random states."""
    return any(
        key.endswith((EMBEDDING, *FINAL_NORMS)) and OPTIMIZER not in key.partition(".")[0] for key in directory.tensors
    )


def optimizer_beside(path: Path) -> Path | None:
    """Return verl's directory of the optimizer's state for that of a model; None for others."""
    path = path.absolute()
    other = path.parent.parent / OPTIMIZER / DIST
    return other if path.name == DIST and path.parent.name == MODEL and dcp.exists(other) else None


def with_optimizer(path: Path, directory: dcp.Directory) -> dcp.Directory:
    """Return a model's directory merged with the optimizer's state that verl stores in a separate directory."""
    other = optimizer_beside(path)
    if other is None or any(f"{OPTIMIZER}." in key for key in directory.tensors):  # or one directory under three names
        return directory
    beside = dcp.read(other)
    up = Path("../..") / OPTIMIZER / DIST

    def moved(place: dcp.Place) -> dcp.Place:
        return place._replace(file=str(up / place.file))

    chunks = {key: [chunk._replace(place=moved(chunk.place)) for chunk in each] for key, each in beside.chunks.items()}
    objects = {key: moved(place) for key, place in beside.objects.items()}
    if COMMON_STATE in objects:  # the model has this key, too
        objects[OF_OPTIMIZER] = objects.pop(COMMON_STATE)
    return replace(
        directory,
        tensors={**beside.tensors, **directory.tensors},
        chunks={**chunks, **directory.chunks},
        objects={**objects, **directory.objects},
        unflattened={**beside.unflattened, **directory.unflattened},
    )
