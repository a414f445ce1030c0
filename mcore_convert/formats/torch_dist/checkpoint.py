"""Format `torch_dist`: Megatron Core's distributed checkpoints, read as 0.8 to 0.19 write them.

Its names are those of `keys`, and the optimizer's state is found by `optimizer`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mcore_convert.errors import UnreadableCheckpoint
from mcore_convert.formats.base import Checkpoint, Common, Findings, Side, Storage, Training
from mcore_convert.formats.files.json_file import read_json
from mcore_convert.formats.files.torch_archive import TorchFile
from mcore_convert.formats.megatron import modules
from mcore_convert.formats.megatron.quantised import tolerance_of
from mcore_convert.formats.megatron.run_directory import carried_in, resolve
from mcore_convert.formats.torch_dist import dcp
from mcore_convert.formats.torch_dist.description import optimizer_form, written_by
from mcore_convert.formats.torch_dist.keys import StateKeys, with_expert_norms
from mcore_convert.formats.torch_dist.optimizer import OptimizerState, find
from mcore_convert.formats.torch_dist.training import training_of
from mcore_convert.spec.dims import Dims
from mcore_convert.spec.family import Item
from mcore_convert.spec.gpt import EMBEDDING, FINAL_NORM
from mcore_convert.spec.names import PARAM
from mcore_convert.storage.rounding import Tolerance
from mcore_convert.storage.views import Slot, Sum, TensorMeta

BACKEND_FILE, TORCH_DIST, ZARR = "metadata.json", "torch_dist", "zarr"
COMMON = "common.pt"
COMMON_STATE = "common_state/shard_0_1"

# Keys that are no weights: optimizer state (plain, distributed and chained), random states, bookkeeping.
NO_WEIGHT = re.compile(r"(chained_\d+\.)?optimizer\.|rng_state/|rerun_state_machine_state/|common_state/")
ANCHORS = (EMBEDDING, FINAL_NORM)


def detect(path: Path) -> bool:
    """Whether a directory has `.metadata`, and no `metadata.json` that names another storage."""
    return dcp.exists(path) and backend_of(path) != ZARR


def directory_of(path: Path) -> Path | None:
    """Return the directory that one of its files lies in; None for any other path."""
    return path.parent if path.is_file() and detect(path.parent) else None


def backend_of(path: Path) -> str:
    """Return the storage that `metadata.json` names; `torch_dist` where it cannot be read.

    The file is of Megatron Core, `dist_checkpointing/core.py`.
    """
    try:
        return str(read_json(path / BACKEND_FILE).get("sharded_backend", TORCH_DIST))
    except UnreadableCheckpoint:
        return TORCH_DIST


@dataclass(frozen=True)
class TorchDistCheckpoint(Checkpoint):
    """An open or a reserved directory. `keys` maps the names of this module's dialects to the keys on disk."""

    directory: dcp.Directory
    keys: Mapping[str, str]
    prefix: str
    reserved: Mapping[str, list[Slot]] | None = None
    format: str = TORCH_DIST
    side: Side = Side.MEGATRON

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

    def tolerance(self, item: Item) -> Tolerance | None:
        return tolerance_of(self.common.args or {}, item.weight, item.at)

    def keeps(self, item: Item, dims: Dims) -> bool:
        return item.state == PARAM or self.optimizer is None or self.optimizer.keeps(item, dims)

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
    def optimizer_keys(self) -> list[str]:
        """The keys of the optimizer's tensors and objects."""
        every = [*self.directory.tensors, *self.directory.objects]
        return [key for key in every if re.match(r"(chained_\d+\.)?optimizer\.", key.removeprefix(self.prefix))]

    @property
    def sums(self) -> Iterator[Sum]:
        return self.directory.sums

    @property
    def companions(self) -> Path | None:
        return carried_in(self.path)

    def check_whole(self) -> None:
        """Prove that every file is there and that the chunks of every weight tile it.

        Raises:
            UnreadableCheckpoint: as `dcp.Directory.check`.
        """
        self.directory.check(self.keys.values())

    @property
    def norm_state(self) -> bool:
        """What is written here for all versions has the state in any case, and tells nothing."""
        ours = (self.path / COMMON).is_file() and COMMON_STATE in self.directory.objects
        key = f"{modules.FINAL_NORM}._extra_state"
        return not ours and any(each.removeprefix(self.prefix).startswith(key) for each in self.directory.objects)

    def remarks(self) -> list[str]:
        idle = self.directory.unreferenced
        if not idle:
            return []
        named = ", ".join(f"`{name}`" for name in idle[:3]) + (f" and {len(idle) - 3} more" if len(idle) > 3 else "")
        return [
            f"`{dcp.METADATA}` refers to nothing in {named}: is a rank's part missing there, or left from another run?"
        ]

    def storage(self) -> Storage:
        chunks = (chunk for chunks in self.directory.chunks.values() for chunk in chunks)
        files = {chunk.place.file for chunk in chunks} | {place.file for place in self.directory.objects.values()}
        return Storage(
            len(files),
            written_by(self.common, self.path),
            self.dialect,
            optimizer_form(self.common, self.optimizer_keys),
        )


def open_torch_dist(path: Path, args: Mapping[str, Any] | None = None) -> TorchDistCheckpoint:
    """Open a directory: `.metadata` and nothing else. Its weights are proven whole by `check_whole`.

    Args:
        args: Megatron arguments that take the place of stored ones, or of those that are not stored.

    Raises:
        UnreadableCheckpoint: no tracker file, damaged metadata, a zarr checkpoint, or no model in it.
    """
    path = resolve(path, dcp.exists, dcp.METADATA)
    if (path / BACKEND_FILE).is_file():
        backend = read_json(path / BACKEND_FILE).get("sharded_backend", TORCH_DIST)
        if backend != TORCH_DIST:
            raise UnreadableCheckpoint(f"`{path}` is in Megatron's `{backend}` format, which is not read yet")
    if (path / "modelopt_state").exists():
        raise UnreadableCheckpoint(f"`{path}` holds a quantised or pruned model (`modelopt_state`)")
    directory = dcp.read(path)
    prefix = prefix_of(path, directory)
    keys = {}
    for on_disk in directory.tensors:
        key = on_disk.removeprefix(prefix)
        if not NO_WEIGHT.match(key) and not NO_WEIGHT.match(on_disk) and "_extra_state" not in key:
            keys[key] = on_disk
    return TorchDistCheckpoint(path, directory, with_expert_norms(keys, keys), prefix)


def prefix_of(path: Path, directory: dcp.Directory) -> str:
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
