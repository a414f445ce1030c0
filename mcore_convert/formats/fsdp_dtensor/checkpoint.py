"""Format `fsdp_dtensor`: Megatron-FSDP's checkpoints, read as Megatron Core 0.14 to 0.20 write them.

    model.module.<name>                                           a weight, usually its fp32 main copy
    optimizer.state.module.module.module.<name>.<state>           `exp_avg`, `exp_avg_sq`, torch's own `step`
    optimizer.param_to_group_meta.module.module.module.<name>.<field>
    args, iteration, opt_param_scheduler.<field>, ...             objects

`<name>` is the module's parameter name with the global number of the expert. A gated `linear_fc1` is two tensors,
`<name>_w` and `<name>_v`. A reader sees each tensor as a whole; its chunks are the uneven rows of each rank. From
Megatron Core 0.16.1, 0.19.0 and main (August 2026), `transformer/fsdp_dtensor_checkpoint.py`
(`handle_swiglu_in_state_dict`, `handle_experts_in_state_dict`, and in main `handle_mla_down_proj_in_state_dict` and
`handle_mtp_in_state_dict`), `optimizer/distrib_optimizer.py` (`sharded_param_state_fsdp_dtensor`),
`megatron_fsdp/param_and_grad_buffer.py` (`_init_distributed_params`: the module holds the main weights), and
`megatron/training/checkpointing.py` (`save_checkpoint`, `preprocess_fsdp_dtensor_state_dict`).
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from mcore_convert.errors import UnreadableCheckpoint
from mcore_convert.formats.base import Checkpoint, Common, Findings, Side, Training
from mcore_convert.formats.files import dcp
from mcore_convert.formats.fsdp_dtensor.optimizer import GATE, UP, FsdpState
from mcore_convert.formats.megatron.dcp_kinds import Kind, kind_of
from mcore_convert.formats.megatron.modules import (
    MTP_LAYER,
    MTP_MODEL_LAYER,
    experts_in,
    implementation_in,
    name_in_module,
)
from mcore_convert.formats.megatron.param_groups import WITHOUT
from mcore_convert.formats.megatron.recorded import common_of, companions_of, progress_files
from mcore_convert.formats.megatron.run_directory import resolve
from mcore_convert.formats.traits import LayerSpec, Storage
from mcore_convert.spec import releases
from mcore_convert.spec.dims import Dims
from mcore_convert.spec.family import Item, Weight
from mcore_convert.spec.gpt import EMBEDDING
from mcore_convert.spec.holding import is_of_expert
from mcore_convert.spec.names import MASTER, PARAM, spell
from mcore_convert.storage.views import Slot, Sum, TensorMeta

FSDP_DTENSOR = "fsdp_dtensor"
# Keys that are not weights: optimizer state, and tensors of random states and of the rerun state machine.
BESIDE = re.compile(r"(optimizer|rng_state|rerun_state_machine|opt_param_scheduler)\.")
SCHEDULER = "opt_param_scheduler."


def detect(path: Path) -> bool:
    """Return whether a directory was written by Megatron-FSDP."""
    return dcp.exists(path) and kind_of(path) is Kind.FSDP_DTENSOR


@dataclass(frozen=True)
class FsdpCheckpoint(Checkpoint):
    """An open or a reserved directory. `prefix` is that of all weights; `given` are arguments of the user."""

    directory: dcp.Directory
    prefix: str
    spec: LayerSpec
    given: Mapping[str, Any] = field(default_factory=dict)
    reserved: Mapping[str, list[Slot]] | None = None
    described: Mapping[str, Any] | None = None
    format: str = FSDP_DTENSOR
    side: Side = Side.MEGATRON

    @cached_property
    def tensors(self) -> Mapping[str, TensorMeta]:
        return {
            key: meta
            for key, meta in self.directory.tensors.items()
            if not BESIDE.match(key) and "_extra_state" not in key
        }

    @property
    def layer_spec(self) -> LayerSpec:
        return self.spec

    @cached_property
    def optimizer(self) -> FsdpState:
        """Keys of the optimizer's state."""
        return FsdpState.of(self.directory, self.prefix)

    @property
    def optimizer_keys(self) -> list[str]:
        """Keys of the optimizer's tensors and objects."""
        every = [*self.directory.tensors, *self.directory.objects]
        return [key for key in every if key.startswith("optimizer.")]

    @property
    def states(self) -> tuple[str, ...]:
        return (PARAM, *(self.optimizer.states if self.optimizer_keys else ()))

    @property
    def weights_are_masters(self) -> bool:
        embedding = self.directory.tensors[f"{self.prefix}{EMBEDDING}"]
        return embedding.dtype == "float32" and not self.optimizer.has_masters

    @cached_property
    def training(self) -> Training | None:
        if not self.optimizer_keys or self.reserved is not None:
            return None
        return self.optimizer.training(self.common)

    def locate(self, item: Item, dims: Dims, findings: Findings) -> list[Slot]:
        weight, at, state = item
        if weight.mcore is None:
            return []
        template = name_in_module(weight.mcore, self.spec.implementation, self.spec.experts)
        name, shape = spell(template, at).replace(MTP_LAYER, self._mtp_layer), dims.shape(weight.shape)
        names = [name]
        if weight.shard.is_gated and f"{self.prefix}{name}{GATE}" in self.directory.tensors:
            names, shape = [f"{name}{GATE}", f"{name}{UP}"], (shape[0] // 2, *shape[1:])
        slots: list[Slot] = []
        for number, part in enumerate(names):
            key = self._key_of(part, state)
            if not findings.expect(key, self.directory.tensors.get(key), shape, rows_at_least=weight.vocab):
                continue
            if len(weight.shard.parts) > 1 and len(names) == 1 and self.reserved is None:
                self._refuse_interleaved(key, weight)
            slots += [slot.moved(number * shape[0]) for slot in self._slots_of(key)]
        return slots

    @cached_property
    def _mtp_layer(self) -> str:
        """Name of the inner layer of one that predicts further tokens: 0.17 to 0.19 use the module's own name."""
        renamed = any(MTP_MODEL_LAYER in key for key in self.directory.tensors)
        return MTP_MODEL_LAYER if renamed else MTP_LAYER

    def _key_of(self, name: str, state: str) -> str:
        """Return the key of one state of a parameter."""
        weight = f"{self.prefix}{name}"
        if state == PARAM:
            return weight
        if state == MASTER and not self.optimizer.has_masters:
            meta = self.directory.tensors.get(weight)
            if meta is not None and meta.dtype != "float32":
                raise UnreadableCheckpoint(
                    f"the run that saved `{self.path}` kept its main weights in {meta.dtype}, and no master copies",
                    hint=WITHOUT,
                )
            return weight
        return self.optimizer.key_of(name, state)

    def _slots_of(self, key: str) -> list[Slot]:
        """Return the chunks of a key."""
        return self.directory.slots(key) if self.reserved is None else self.reserved[key]

    def _refuse_interleaved(self, key: str, weight: Weight) -> None:
        """Refuse an unsplit tensor of several parts from several ranks: each rank has rows of each part in turn.

        No release splits the segments of linear attention (0.19 and 0.20: nothing calls `handle_gdn_in_state_dict`).
        """
        args, segments = self.common.args or {}, weight.shard.names
        tp = args.get("tensor_model_parallel_size") or 1
        if is_of_expert(weight):
            tp = args.get("expert_tensor_parallel_size") or tp
        if tp > 1 and segments:
            raise UnreadableCheckpoint(
                f"`{key}` in `{self.path}` is not split into {', '.join(f'`{name}`' for name in segments)}, and was "
                f"saved by {tp} tensor ranks",
                hint="its segments lie rank by rank: save it with TP 1, or as `torch_dist`",
            )
        if tp > 1:
            raise UnreadableCheckpoint(
                f"`{key}` in `{self.path}` is not split into `{GATE}` and `{UP}`, and was saved by {tp} tensor ranks",
                hint="its gate and up lie rank by rank: save it with Megatron-LM's --swiglu",
            )

    @cached_property
    def common(self) -> Common:
        """Objects with names of their own and the scheduler's numbers, merged with another program's configuration.

        Raises:
            UnreadableCheckpoint: one of them is damaged.
            ConfigError: the other program's configuration names unknown classes or functions.
        """
        objects = self.directory.objects
        state = {key: self.directory.object(key) for key in objects if "." not in key}
        scheduler = {key: self.directory.value(key) for key in self.directory.under(SCHEDULER)}
        if scheduler:
            state["opt_param_scheduler"] = {key.removeprefix(SCHEDULER): value for key, value in scheduler.items()}
        if self.given:
            stored = state.get("args")
            own = vars(stored) if isinstance(stored, argparse.Namespace) else {}
            state["args"] = argparse.Namespace(**{**own, **self.given})
        known = {"transformer_impl": self.spec.implementation}
        return common_of(state, self.path, self.embedding_rows, known, self.described)

    def described_by(self, args: Mapping[str, Any]) -> FsdpCheckpoint:
        return replace(self, described=args)

    @property
    def embedding_rows(self) -> int | None:
        shape = self.directory.tensors[f"{self.prefix}{EMBEDDING}"].shape
        return shape[0] if shape else None

    @property
    def companions(self) -> Path | None:
        return companions_of(self.path)

    def progress_files(self, path: Path, name: str) -> Iterator[tuple[Path, Path]]:
        """Yield the files of Megatron-Bridge, in the directory of an iteration and above it."""
        return progress_files(self.path, self.common, path, name)

    @property
    def sums(self) -> Iterator[Sum]:
        return self.directory.sums

    def check_whole(self) -> None:
        """Check that every file exists and that the chunks of every weight tile it.

        Raises:
            UnreadableCheckpoint: as `dcp.Directory.check`.
        """
        self.directory.check(self.tensors)

    def storage(self) -> Storage:
        release = releases.of_run(self.common.args or {})
        written_by = None if release is None else f"Megatron-FSDP of Megatron Core {releases.spelled(release)} or later"
        if self.common.recorded is not None:
            written_by = self.common.recorded.program
        optimizer = f"distributed, {FSDP_DTENSOR}" if self.optimizer_keys else None
        return Storage(self.directory.num_files, written_by, optimizer=optimizer)


def open_fsdp_dtensor(path: Path, args: Mapping[str, Any] | None = None) -> FsdpCheckpoint:
    """Open a directory by reading only `.metadata`; `check_whole` checks that the weights are complete.

    Args:
        args: Megatron arguments that override or complete the stored ones.

    Raises:
        UnreadableCheckpoint: no tracker file, damaged metadata, or no GPT model in it.
    """
    path = resolve(path, dcp.exists, dcp.METADATA)
    directory = dcp.read(path)
    prefixes = sorted(
        {
            key.removesuffix(EMBEDDING)
            for key in directory.tensors
            if key.startswith("model") and key.endswith(f".{EMBEDDING}")
        }
    )
    if len(prefixes) != 1:
        raise UnreadableCheckpoint(
            f"`{path}` holds {'no GPT model' if not prefixes else 'several models'}",
            items=prefixes or [f"no key ends in {EMBEDDING}"],
        )
    names = [key for key in directory.tensors if key.startswith(prefixes[0])]
    stored = directory.object("args") if "args" in directory.objects else None
    own = vars(stored) if isinstance(stored, argparse.Namespace) else {}
    spec = LayerSpec(implementation_in(names, {**own, **(args or {})}), experts_in(names))
    return FsdpCheckpoint(path, directory, prefixes[0], spec, args or {})
