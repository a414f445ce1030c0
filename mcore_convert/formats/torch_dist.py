"""Format `torch_dist`: Megatron Core's distributed checkpoints, read as 0.8 to 0.19 write them.

Its names are those of `torch_dist_keys`, and the optimizer's state is found by `torch_dist_optimizer`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mcore_convert.errors import UnreadableCheckpoint
from mcore_convert.formats import dcp
from mcore_convert.formats.base import Findings, Training
from mcore_convert.formats.hf import read_json
from mcore_convert.formats.torch_dist_keys import StateKeys, with_expert_norms
from mcore_convert.formats.torch_dist_optimizer import OptimizerState, find
from mcore_convert.formats.torch_dist_training import training_of
from mcore_convert.formats.torch_file import TorchFile
from mcore_convert.spec.dims import Dims
from mcore_convert.spec.family import Item
from mcore_convert.spec.names import PARAM
from mcore_convert.tensors import Slot, TensorMeta

TRACKER = "latest_checkpointed_iteration.txt"
COMMON = "common.pt"
COMMON_STATE = "common_state/shard_0_1"
MAX_DIGITS = 18  # of an iteration: more are no number that training could reach
CARRIED = "hf"  # folder for what a Hugging Face model has beside its weights

# Keys that are no weights: optimizer state (plain, distributed and chained), random states, bookkeeping.
NO_WEIGHT = re.compile(r"(chained_\d+\.)?optimizer\.|rng_state/|rerun_state_machine_state/|common_state/")
ANCHORS = ("embedding.word_embeddings.weight", "decoder.final_layernorm.weight")


def detect(path: Path) -> bool:
    """Whether a directory is one of these, or holds one."""
    return dcp.exists(path) or (path / TRACKER).is_file() or any(map(dcp.exists, iterations(path)))


def iterations(path: Path) -> list[Path]:
    """The directories of a run that may each hold a checkpoint."""
    return sorted(p for p in path.glob("*") if p.name == "release" or re.fullmatch(r"iter_\d+", p.name))


def resolve(path: Path) -> Path:
    """The directory of the checkpoint itself: `path`, or the one that its tracker file names.

    Raises:
        UnreadableCheckpoint: no tracker file, or it names a directory that is not there.
    """
    return resolve_by(path, dcp.exists, dcp.METADATA)


def resolve_by(path: Path, is_checkpoint: Callable[[Path], object], content: str) -> Path:
    """`path` where it is a checkpoint, else the directory that its tracker file names.

    Args:
        content: what every checkpoint of the format has, for the message where it has not.

    Raises:
        UnreadableCheckpoint: no tracker file, or it names a directory that is not there.
    """
    if is_checkpoint(path):
        return path
    tracker = path / TRACKER
    if not tracker.is_file():
        found = [str(p) for p in iterations(path)]
        raise UnreadableCheckpoint(
            f"`{path}` has no tracker file `{TRACKER}`",
            items=found,
            hint=f"name the directory of one iteration: `{found[-1]}`" if found else "is this a Megatron checkpoint?",
        )
    said = tracker.read_text(errors="replace").strip()
    if said != "release" and not (said.isdecimal() and len(said) <= MAX_DIGITS):
        raise UnreadableCheckpoint(f"`{tracker}` says `{said[:40]}`, which is neither an iteration nor `release`")
    chosen = path / (said if said == "release" else f"iter_{int(said):07d}")
    if not is_checkpoint(chosen):
        raise UnreadableCheckpoint(f"`{tracker}` names `{chosen.name}`, which has no `{content}`")
    return chosen


@dataclass(frozen=True)
class Common:
    """What a checkpoint stores beside tensors: the run's arguments, its iteration, and the rest as it stands."""

    args: Mapping[str, Any] | None
    iteration: int | None
    state: Mapping[str, Any]


@dataclass(frozen=True)
class TorchDistCheckpoint:
    """An open or a reserved directory. `keys` maps the names of this module's dialects to the keys on disk."""

    path: Path
    directory: dcp.Directory
    keys: Mapping[str, str]
    prefix: str
    reserved: Mapping[str, list[Slot]] | None = None
    format: str = "torch_dist"

    @cached_property
    def weights(self) -> StateKeys:
        """The model's own tensors."""
        return StateKeys(self.directory, self.keys, reserved=self.reserved)

    @cached_property
    def optimizer(self) -> OptimizerState | None:
        """The optimizer's tensors; None where there are none.

        Raises:
            ConvertError: they are in a form that is not read, or one of them has no place.
        """
        if not self.optimizer_keys:
            return None
        state = {} if self.reserved is not None else self.common.state
        return find(self.directory, self.prefix, self.weights, self.optimizer_keys, state, self.reserved)

    @property
    def tensors(self) -> Mapping[str, TensorMeta]:
        return self.weights.tensors

    def slots(self, key: str) -> list[Slot]:
        """The chunks of a weight's key; their headers are read once."""
        return self.weights.slots(key)

    @property
    def dialect(self) -> str:
        """`stacked`, `per_layer` or `singleton`."""
        return self.weights.dialect

    @property
    def states(self) -> tuple[str, ...]:
        return (PARAM, *(() if self.optimizer is None else self.optimizer.states))

    @cached_property
    def training(self) -> Training | None:
        if not self.optimizer_keys or self.reserved is not None:
            return None
        return training_of(self.directory, self.prefix, self.optimizer_keys, self.common.state)

    @property
    def found_by_order(self) -> bool:
        return self.optimizer is not None and self.optimizer.found_by_order

    def locate(self, item: Item, dims: Dims, findings: Findings) -> list[Slot]:
        if item.state == PARAM or item.weight.mcore is None:
            return self.weights.locate(item.weight, item.at, dims, findings)
        if self.optimizer is None:
            findings.missing.append(str(item))
            return []
        return self.optimizer.locate(item, dims, findings)

    def replicas(self, item: Item, dims: Dims) -> Iterable[tuple[Slot, str]]:
        return () if item.state == PARAM or self.optimizer is None else self.optimizer.replicas(item, dims)

    @cached_property
    def common(self) -> Common:
        """The common state, from `common.pt` (until 0.18) or the object `common_state` (since 0.19).

        Raises:
            UnreadableCheckpoint: there is neither.
        """
        file = self.path / COMMON
        if file.is_file():
            state = TorchFile(file).tree
        elif COMMON_STATE in self.directory.objects:
            state = self.directory.object(COMMON_STATE)
        else:
            raise UnreadableCheckpoint(
                f"`{self.path}` has neither `{COMMON}` nor `{COMMON_STATE}`",
                hint="the checkpoint was not copied completely",
            )
        if isinstance(state, list) and len(state) == 1:  # a sharded object is saved as a list of one
            (state,) = state
        if not isinstance(state, dict):
            raise UnreadableCheckpoint(f"the common state of `{self.path}` is not a dict")
        args = state.get("args")
        iteration = state.get("iteration")
        return Common(
            dict(vars(args)) if isinstance(args, argparse.Namespace) else None,
            iteration if isinstance(iteration, int) else None,
            state,
        )

    @property
    def embedding_rows(self) -> int:
        """Rows of the word embedding, padding included."""
        embedding = self.tensors.get(ANCHORS[0])
        if embedding is None or not embedding.shape:
            raise UnreadableCheckpoint(f"`{self.path}` has no `{ANCHORS[0]}`")
        return embedding.shape[0]

    @property
    def optimizer_keys(self) -> list[str]:
        """The keys of the optimizer's tensors and objects."""
        every = [*self.directory.tensors, *self.directory.objects]
        return [key for key in every if re.match(r"(chained_\d+\.)?optimizer\.", key.removeprefix(self.prefix))]

    @property
    def archives(self) -> Iterator[dcp.Archive]:
        return self.directory.archives

    @property
    def carried(self) -> Path | None:
        """The folder of a Hugging Face model's other files, where the checkpoint was converted from one."""
        folder = self.path / CARRIED
        return folder if folder.is_dir() else None


def open_torch_dist(path: Path) -> TorchDistCheckpoint:
    """Open a directory: `.metadata` and nothing else. Its weights are proven whole by `check_whole`.

    Raises:
        UnreadableCheckpoint: no tracker file, damaged metadata, a zarr checkpoint, or no model in it.
    """
    path = resolve(path)
    if (path / "metadata.json").is_file():
        backend = read_json(path / "metadata.json").get("sharded_backend", "torch_dist")
        if backend != "torch_dist":
            raise UnreadableCheckpoint(f"`{path}` is in Megatron's `{backend}` format, which is not read yet")
    if (path / "modelopt_state").exists():
        raise UnreadableCheckpoint(f"`{path}` holds a quantised or pruned model (`modelopt_state`)")
    directory = dcp.read(path)
    prefix = _prefix(path, directory)
    keys = {}
    for on_disk in directory.tensors:
        key = on_disk.removeprefix(prefix)
        if not NO_WEIGHT.match(key) and not NO_WEIGHT.match(on_disk) and "_extra_state" not in key:
            keys[key] = on_disk
    return TorchDistCheckpoint(path, directory, with_expert_norms(keys), prefix)


def check_whole(checkpoint: TorchDistCheckpoint) -> None:
    """Prove that every file is there and that the chunks of every weight tile it.

    Raises:
        UnreadableCheckpoint: as `dcp.Directory.check`.
    """
    checkpoint.directory.check(checkpoint.keys.values())


def notes_of(checkpoint: TorchDistCheckpoint) -> list[str]:
    """What a user should know of a directory that is whole."""
    idle = checkpoint.directory.unreferenced
    if not idle:
        return []
    named = ", ".join(f"`{name}`" for name in idle[:3]) + (f" and {len(idle) - 3} more" if len(idle) > 3 else "")
    return [f"`{dcp.METADATA}` refers to nothing in {named}: is a rank's part missing there, or left from another run?"]


def _prefix(path: Path, directory: dcp.Directory) -> str:
    """What a wrapper put before every key: `module.`, `model.`, `language_model.`; mostly nothing."""
    found = {
        key.removesuffix(anchor)
        for key in directory.tensors
        for anchor in ANCHORS
        if key.endswith(anchor) and not NO_WEIGHT.search(key)
    }
    if len(found) != 1:
        raise UnreadableCheckpoint(
            f"`{path}` holds {'no GPT model' if not found else 'several models'}",
            items=sorted(found) or [f"no key ends in {anchor}" for anchor in ANCHORS],
        )
    return found.pop()
