"""Format `torch_dist`: Megatron Core's distributed checkpoints, read as 0.8 to 0.19 write them.

`keys` handles the names, and `optimizer` the optimizer's state.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from mcore_convert.errors import UnreadableCheckpoint
from mcore_convert.formats.base import Checkpoint, Common, Findings, Side, Training
from mcore_convert.formats.files import dcp
from mcore_convert.formats.files.json_file import read_json
from mcore_convert.formats.megatron import modules
from mcore_convert.formats.megatron.dcp_kinds import BACKEND_FILE, Kind, kind_of
from mcore_convert.formats.megatron.random_states import random_states
from mcore_convert.formats.megatron.recorded import common_of, companions_of, progress_files
from mcore_convert.formats.megatron.run_directory import resolve
from mcore_convert.formats.megatron.tolerances import tolerance_of
from mcore_convert.formats.random_states import RandomStates
from mcore_convert.formats.torch_dist.common_state import COMMON, COMMON_STATE, common_state
from mcore_convert.formats.torch_dist.description import optimizer_form, written_by
from mcore_convert.formats.torch_dist.directories import inner_directory, optimizer_beside, with_optimizer
from mcore_convert.formats.torch_dist.keys import SlotsByPlace, StateKeys, with_fused_norms
from mcore_convert.formats.torch_dist.optimizer import OptimizerState, find
from mcore_convert.formats.torch_dist.training import training_of
from mcore_convert.formats.traits import Storage
from mcore_convert.spec.dims import Dims
from mcore_convert.spec.family import Item
from mcore_convert.spec.gpt import EMBEDDING, FINAL_NORMS
from mcore_convert.spec.layout import Layout
from mcore_convert.spec.names import PARAM
from mcore_convert.storage.rounding import Tolerance
from mcore_convert.storage.views import Slot, Sum, TensorMeta

TORCH_DIST, ZARR = "torch_dist", "zarr"

# Keys that are not weights: optimizer state (plain, distributed and chained), random states, bookkeeping.
NO_WEIGHT = re.compile(r"(chained_\d+\.)?optimizer\.|rng_state/|rerun_state_machine_state/|common_state/")
RANDOM_KEY = re.compile(r"rng_state/shard_([\d.]+)_([\d.]+)")
ANCHORS = (EMBEDDING, *FINAL_NORMS)


def detect(path: Path) -> bool:
    """Return whether a directory has `.metadata` with Megatron's names,
    and no `metadata.json` with another backend.
    """
    return dcp.exists(path) and backend_of(path) != ZARR and kind_of(path) is Kind.MEGATRON


def directory_of(path: Path) -> Path | None:
    """Return the directory of one of its files, or the one inside another program's directory; None for others."""
    return path.parent if path.is_file() and detect(path.parent) else inner_directory(path)


def backend_of(path: Path) -> str:
    """Return the backend that `metadata.json` names; `torch_dist` if it cannot be read.

    Megatron Core writes the file in `dist_checkpointing/core.py`.
    """
    try:
        return str(read_json(path / BACKEND_FILE).get("sharded_backend", TORCH_DIST))
    except UnreadableCheckpoint:
        return TORCH_DIST


@dataclass(frozen=True)
class TorchDistCheckpoint(Checkpoint):
    """An open or a reserved directory. `keys` maps the names of this module's dialects to the keys on disk.

    `described` are arguments from the model's configuration, for a run that stored none.
    """

    directory: dcp.Directory
    keys: Mapping[str, str]
    prefix: str
    reserved: Mapping[str, SlotsByPlace] | None = None
    described: Mapping[str, Any] | None = None
    format: str = TORCH_DIST
    side: Side = Side.MEGATRON

    @cached_property
    def weights(self) -> StateKeys:
        """Keys of the model's tensors."""
        return StateKeys(self.directory, self.keys, reserved=self.reserved)

    @cached_property
    def optimizer(self) -> OptimizerState | None:
        """State of the optimizer; None if there is none.

        Raises:
            ConvertError: its form is not supported, or a tensor has no place in it.
        """
        if not self.optimizer_keys:
            return None
        state = {} if self.reserved is not None else self.common.state
        return find(self.directory, self.prefix, self.weights, self.optimizer_keys, state, self.reserved)

    @property
    def tensors(self) -> Mapping[str, TensorMeta]:
        return self.weights.tensors

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
    def random_states(self) -> RandomStates | None:
        matched = {key: each for key in self.directory.objects if (each := RANDOM_KEY.fullmatch(key)) is not None}
        places = {tuple(map(int, each[1].split("."))): key for key, each in matched.items()}
        grids = {tuple(map(int, each[2].split("."))) for each in matched.values()}
        if len(grids) != 1 or self.common.args is None:
            return None
        (sizes,) = grids
        if len(places) != math.prod(sizes) or len(sizes) not in (2, 3):
            return None
        contents = {place: self.directory.object(key) for place, key in places.items()}
        return random_states(contents, ("pp", "tp", "dp")[: len(sizes)], sizes, Layout.of(self.common.args).ep)

    @property
    def matched_by_order(self) -> bool:
        return self.optimizer is not None and self.optimizer.matched_by_order

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
        """Common state; if it has no arguments, with those that another program has stored beside it.

        Raises:
            UnreadableCheckpoint: there is no common state.
            ConfigError: the other program's configuration names unknown classes or functions.
        """
        state = common_state(self.path, self.directory, optimizer_beside(self.path))
        known = {} if self._has_norm_state else {"transformer_impl": modules.LOCAL}
        return common_of(state, self.path, self.embedding_rows, known, self.described)

    def described_by(self, args: Mapping[str, Any]) -> TorchDistCheckpoint:
        return replace(self, described=args)

    @property
    def optimizer_keys(self) -> list[str]:
        """Keys of the optimizer's tensors and objects."""
        every = [*self.directory.tensors, *self.directory.objects]
        return [key for key in every if re.match(r"(chained_\d+\.)?optimizer\.", key.removeprefix(self.prefix))]

    @property
    def sums(self) -> Iterator[Sum]:
        return self.directory.sums

    @property
    def companions(self) -> Path | None:
        return companions_of(self.path)

    def progress_files(self, path: Path, name: str) -> Iterator[tuple[Path, Path]]:
        """Yield the files of Megatron-Bridge, in the directory of an iteration and above it."""
        return progress_files(self.path, self.common, path, name)

    def check_whole(self) -> None:
        """Check that every file exists and that the chunks of every weight tile it.

        Raises:
            UnreadableCheckpoint: as `dcp.Directory.check`.
        """
        self.directory.check(self.keys.values())

    @property
    def norm_state(self) -> bool:
        """Whether the run had Transformer Engine's final norm; False for our own files, which always have its state."""
        ours = (self.path / COMMON).is_file() and COMMON_STATE in self.directory.objects
        return not ours and self._has_norm_state

    @property
    def _has_norm_state(self) -> bool:
        """Whether the final norm has an extra state, which it has if Transformer Engine is installed."""
        keys = tuple(f"{norm}._extra_state" for norm in modules.FINAL_NORMS)
        return any(each.removeprefix(self.prefix).startswith(keys) for each in self.directory.objects)

    def remarks(self) -> list[str]:
        idle = self.directory.unreferenced
        if not idle:
            return []
        named = ", ".join(f"`{name}`" for name in idle[:3]) + (f" and {len(idle) - 3} more" if len(idle) > 3 else "")
        return [
            f"`{dcp.METADATA}` refers to nothing in {named}: is a rank's part missing there, or left from another run?"
        ]

    def storage(self) -> Storage:
        return Storage(
            self.directory.num_files,
            self.common.recorded.program if self.common.recorded else written_by(self.common, self.path),
            self.dialect,
            optimizer_form(self.common, self.optimizer_keys),
        )


def open_torch_dist(path: Path, args: Mapping[str, Any] | None = None) -> TorchDistCheckpoint:
    """Open a directory by reading only `.metadata`; `check_whole` checks that the weights are complete.

    Args:
        args: Megatron arguments that override or complete the stored ones.

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
    directory = with_optimizer(path, dcp.read(path))
    prefix = prefix_of(path, directory)
    keys = {}
    for on_disk in directory.tensors:
        key = on_disk.removeprefix(prefix)
        if not NO_WEIGHT.match(key) and not NO_WEIGHT.match(on_disk) and "_extra_state" not in key:
            keys[key] = on_disk
    return TorchDistCheckpoint(path, directory, with_fused_norms(keys, keys), prefix)


def prefix_of(path: Path, directory: dcp.Directory) -> str:
    """Return the prefix that a wrapper adds to every key: `module.`, `model.`, `language_model.`; usually empty."""
    prefixes = {
        key.removesuffix(anchor)
        for key in directory.tensors
        for anchor in ANCHORS
        if key.endswith(anchor) and not NO_WEIGHT.search(key)
    }
    if len(prefixes) != 1:
        raise UnreadableCheckpoint(
            f"`{path}` holds {'no GPT model' if not prefixes else 'several models'}",
            items=sorted(prefixes) or [f"no key ends in {anchor}" for anchor in ANCHORS],
        )
    return prefixes.pop()
