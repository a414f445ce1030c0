"""Format `torch_dist`: Megatron Core's distributed checkpoints, read as 0.8 to 0.19 write them.

A placeholder of a weight's name is either spelled into the key or becomes a leading axis of its tensor. That is the
whole difference between the three dialects (Megatron Core, `transformer_block.py`, `sharded_state_dict`):

    stacked     decoder.layers.mlp.linear_fc1.weight      [layers, ...], experts [layers, experts, ...]
    per_layer   decoder.layers.7.mlp.linear_fc1.weight    [...], experts [experts, ...]
    singleton   decoder.layers.7.mlp.linear_fc1.weight_w  gated parts under two keys, each expert under its own
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mcore_convert.errors import UnreadableCheckpoint
from mcore_convert.formats import dcp
from mcore_convert.formats.base import Findings, Training
from mcore_convert.formats.hf import read_json
from mcore_convert.formats.torch_file import TorchFile
from mcore_convert.spec.dims import Dims
from mcore_convert.spec.family import Item
from mcore_convert.spec.names import PARAM, drop, placeholders_of, spell
from mcore_convert.spec.shard import Box
from mcore_convert.tensors import Slot, TensorMeta

TRACKER = "latest_checkpointed_iteration.txt"
COMMON = "common.pt"
COMMON_STATE = "common_state/shard_0_1"
MAX_DIGITS = 18  # of an iteration: more are no number that training could reach
CARRIED = "hf"  # folder for what a Hugging Face model has beside its weights

# Keys that are no weights: optimizer state (plain, distributed and chained), random states, bookkeeping.
NO_WEIGHT = re.compile(r"(chained_\d+\.)?optimizer\.|rng_state/|rerun_state_machine_state/|common_state/")
ANCHORS = ("embedding.word_embeddings.weight", "decoder.final_layernorm.weight")

# Layers whose experts were built from the local spec have their pre-MLP norm under the name that dense layers use.
DENSE_NORM, EXPERT_NORM, ROUTER = "mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.", "mlp.router.weight"


def detect(path: Path) -> bool:
    """Whether a directory is one of these, or holds one."""
    return dcp.exists(path) or (path / TRACKER).is_file() or any(map(dcp.exists, _iterations(path)))


def _iterations(path: Path) -> list[Path]:
    return sorted(p for p in path.glob("*") if p.name == "release" or re.fullmatch(r"iter_\d+", p.name))


def resolve(path: Path) -> Path:
    """The directory of the checkpoint itself: `path`, or the one that its tracker file names.

    Raises:
        UnreadableCheckpoint: no tracker file, or it names a directory that is not there.
    """
    if dcp.exists(path):
        return path
    tracker = path / TRACKER
    if not tracker.is_file():
        found = [str(p) for p in _iterations(path)]
        raise UnreadableCheckpoint(
            f"`{path}` has no tracker file `{TRACKER}`",
            items=found,
            hint=f"name the directory of one iteration: `{found[-1]}`" if found else "is this a Megatron checkpoint?",
        )
    said = tracker.read_text(errors="replace").strip()
    if said != "release" and not (said.isdecimal() and len(said) <= MAX_DIGITS):
        raise UnreadableCheckpoint(f"`{tracker}` says `{said[:40]}`, which is neither an iteration nor `release`")
    chosen = path / (said if said == "release" else f"iter_{int(said):07d}")
    if not dcp.exists(chosen):
        raise UnreadableCheckpoint(f"`{tracker}` names `{chosen.name}`, which has no `{dcp.METADATA}`")
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
    def tensors(self) -> Mapping[str, TensorMeta]:
        return {key: self.directory.tensors[on_disk] for key, on_disk in self.keys.items()}

    @cached_property
    def _slots(self) -> dict[str, list[Slot]]:
        return {}

    def slots(self, key: str) -> list[Slot]:
        """The chunks of a key; their headers are read once."""
        if self.reserved is not None:
            return self.reserved[key]
        if key not in self._slots:
            self._slots[key] = self.directory.slots(self.keys[key])
        return self._slots[key]

    @cached_property
    def dialect(self) -> str:
        """`stacked`, `per_layer` or `singleton`."""
        if not any(re.search(r"decoder\.layers\.\d+\.", key) for key in self.keys):
            return "stacked"
        singleton = re.compile(r"linear_fc1\.(weight|bias)_[wv]$|\.experts\.experts\.\d+\.")
        return "singleton" if any(singleton.search(key) for key in self.keys) else "per_layer"

    @property
    def states(self) -> tuple[str, ...]:
        return (PARAM,)

    @property
    def training(self) -> Training | None:
        return None

    @property
    def found_by_order(self) -> bool:
        return False

    def replicas(self, item: Item, dims: Dims) -> Iterable[tuple[Slot, str]]:
        return ()

    def locate(self, item: Item, dims: Dims, findings: Findings) -> list[Slot]:
        weight, at, _ = item
        if weight.mcore is None:
            return []
        shape = dims.shape(weight.shape)
        axes = self._axes(weight.mcore)
        name = spell(drop(weight.mcore, *axes), at)
        parts = [name]
        if name not in self.keys and weight.shard.parts == 2 and f"{name}_w" in self.keys:
            parts = [f"{name}_w", f"{name}_v"]  # gate and up under keys of their own
            shape = (shape[0] // 2, *shape[1:])
        leading = {"layer": dims.num_layers, "expert": dims.num_experts or 0}
        lead = tuple(leading[axis] for axis in axes)
        place = tuple(getattr(at, axis) for axis in axes)
        slots: list[Slot] = []
        for number, part in enumerate(parts):
            meta = self.tensors.get(part)
            if meta is not None and weight.vocab and meta.shape[1:] == shape[1:] and meta.shape[0] >= shape[0]:
                findings.used.add(part)
            elif not findings.expect(part, meta, (*lead, *shape)):
                continue
            for slot in self.slots(part):
                selected = _select(slot, place)
                if selected is not None:
                    slots.append(_moved(selected, number * shape[0]))
        return slots

    def _axes(self, template: str) -> tuple[str, ...]:
        """Which placeholders are leading axes here."""
        held = placeholders_of(template)
        return {"stacked": held, "per_layer": tuple(a for a in held if a == "expert"), "singleton": ()}[self.dialect]

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
    def carried(self) -> Path | None:
        """The folder of a Hugging Face model's other files, where the checkpoint was converted from one."""
        folder = self.path / CARRIED
        return folder if folder.is_dir() else None


def _select(slot: Slot, place: tuple[int, ...]) -> Slot | None:
    """The part of a chunk that lies at one index of each leading axis, without those axes; None where it has none."""
    view, box = slot.view, slot.box
    for index in place:
        if not box.offsets[0] <= index < box.offsets[0] + box.sizes[0]:
            return None
        view = view.select(index - box.offsets[0])
        box = Box(box.offsets[1:], box.sizes[1:])
    return Slot(view, box)


def _moved(slot: Slot, rows: int) -> Slot:
    box = slot.box
    return Slot(slot.view, Box((box.offsets[0] + rows, *box.offsets[1:]), box.sizes)) if rows else slot


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
    return TorchDistCheckpoint(path, directory, _with_expert_norms(keys), prefix)


def check_whole(checkpoint: TorchDistCheckpoint) -> None:
    """Prove that every file is there and that the chunks of every weight tile it.

    Raises:
        UnreadableCheckpoint: as `dcp.Directory.check`.
    """
    checkpoint.directory.check(checkpoint.keys.values())


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


def _with_expert_norms(keys: Mapping[str, str]) -> dict[str, str]:
    """The pre-MLP norm of layers with experts under the one name that Transformer Engine models give it."""
    renamed = {}
    for key, on_disk in keys.items():
        head, found, tail = key.partition(DENSE_NORM)
        has_experts = found and f"{head}{ROUTER}" in keys
        renamed[f"{head}{EXPERT_NORM}{tail}" if has_experts else key] = on_disk
    return renamed
