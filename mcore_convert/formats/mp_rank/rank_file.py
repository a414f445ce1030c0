"""One rank's files in the format `torch`: its model chunks as local tensors with their views."""

from __future__ import annotations

import argparse
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mcore_convert.errors import UnreadableCheckpoint
from mcore_convert.formats.files.sharing import refuse_shared, views_in
from mcore_convert.formats.files.torch_archive import TorchFile
from mcore_convert.formats.megatron.modules import name_in_any_release
from mcore_convert.formats.mp_rank import old_classes
from mcore_convert.spec.shard import Box
from mcore_convert.storage.views import Slot, Sum, TensorMeta, View

MODEL_FILE, DISTRIBUTED_FILE = "model_optim_rng.pt", "distrib_optim.pt"
JOINED_EXPERTS = re.compile(r"(.*mlp\.experts\.)weight([12])")
LAYER = re.compile(r"decoder\.layers\.(\d+)\.")

# Entries of a state dict that are not weights: state of Transformer Engine's modules, rotary frequencies of old runs.
NO_WEIGHT = ("_extra_state", "inv_freq")

Arrange = Callable[[View], list[Slot]]


def as_it_is(view: View) -> list[Slot]:
    """Return the slot of a local tensor that is stored in the order of Megatron Core's modules."""
    return [Slot(view, Box.whole(view.shape))]


@dataclass(frozen=True)
class LocalTensor:
    """A rank's part of a weight: its key on disk, its view, and a function from a stored view to slots.

    `arrange` also applies to the optimizer's states, which are stored as the parameter is; for a reserved tensor,
    `moments` names those of its optimizer.
    """

    key: str
    view: View
    arrange: Arrange = as_it_is
    joined: str | None = None  # key on disk of a tensor that contains this one and others
    moments: tuple[str, ...] = ()

    @property
    def meta(self) -> TensorMeta:
        return self.view.meta


# The tensors of one model chunk by their names in Megatron Core's modules, in the order of the file, which is that of
# the modules.
Chunk = Mapping[str, LocalTensor]


@dataclass(frozen=True)
class RankFile:
    """The files of one rank. `tree` is the content of its model file without the model.

    `reserved_buffers` is the content of a `distrib_optim.pt` that is laid out but not written. `model_sums` are the
    checksums in its model file.
    """

    name: str
    path: Path
    tree: Mapping[str, Any]
    chunks: tuple[Chunk, ...]
    reserved_buffers: Any = None
    model_sums: tuple[Sum, ...] = ()

    @property
    def iteration(self) -> Any:
        """Iteration, which old versions call `total_iters`."""
        return self.tree.get("iteration", self.tree.get("total_iters"))

    def label(self, chunk: int) -> str:
        """Return the label of a chunk's keys in messages: the rank, and the chunk if there are several."""
        return f"{self.name}: " if len(self.chunks) == 1 else f"{self.name} model{chunk}: "

    @cached_property
    def distributed(self) -> Any:
        """Content of `distrib_optim.pt`, or None."""
        if self.reserved_buffers is not None:
            return self.reserved_buffers
        return None if self._distributed_file is None else self._distributed_file.tree

    @cached_property
    def _distributed_file(self) -> TorchFile | None:
        file = self.path.with_name(DISTRIBUTED_FILE)
        if not file.is_file():
            return None
        archive = TorchFile(file)
        refuse_shared(file, dict(views_in(archive.tree)))
        return archive

    @property
    def sums(self) -> Iterator[Sum]:
        """Checksums of tensors that the files store."""
        yield from self.model_sums
        if self._distributed_file is not None:
            yield from self._distributed_file.sums


def args_of(tree: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the run's arguments, if the file has them."""
    args = tree.get("args")
    return dict(vars(args)) if isinstance(args, argparse.Namespace) else None


def read_archive(path: Path) -> TorchFile:
    """Read a rank's file, without its tensors.

    Raises:
        UnreadableCheckpoint: it is damaged, or not a checkpoint of a model.
    """
    archive = TorchFile(path)
    if not isinstance(archive.tree, dict):
        raise UnreadableCheckpoint(f"`{path}` is not the dict that Megatron-LM saves")
    refuse_shared(path, dict(views_in(archive.tree)))
    return archive


def models_of(tree: Mapping[str, Any], where: str) -> list[Mapping[str, Any]]:
    """Return the state dict of each model chunk: `model`, or `model0`, `model1` and so on with virtual stages.

    Raises:
        UnreadableCheckpoint: there is no model.
    """
    models = [tree["model"]] if "model" in tree else []
    while "model" not in tree and f"model{len(models)}" in tree:
        models.append(tree[f"model{len(models)}"])
    if not models or not all(isinstance(model, dict) for model in models):
        raise UnreadableCheckpoint(f"{where} has no `model`", items=[f"it has `{key}`" for key in tree])
    return models


def chunks_of(tree: Mapping[str, Any], args: Mapping[str, Any], where: str) -> tuple[Chunk, ...]:
    """Return the chunks of a rank, for models of Megatron Core's classes and of those before.

    Raises:
        UnreadableCheckpoint: the size of a tensor of joined experts does not fit their number.
        MappingError: the names of an old model are not those of a GPT model.
    """
    chunks: list[Chunk] = []
    for model in models_of(tree, where):
        if old_classes.is_old(model):
            chunks.append(_old_chunk(model, tree.get("checkpoint_version") or 0, args))
            continue
        views = {key: view for key, view in model.items() if isinstance(view, View) and not key.endswith(NO_WEIGHT)}
        chunks.append(dict(each for key, view in views.items() for each in _local_tensors(key, view, args, where)))
    return tuple(chunks)


def name_of_weight(key: str) -> str:
    """Return the name of a local tensor, independent of the release."""
    return name_in_any_release(key)


def _local_tensors(key: str, view: View, args: Mapping[str, Any], where: str) -> Iterator[tuple[str, LocalTensor]]:
    """Yield a tensor of a chunk with its name, or those of the experts that it contains.

    `GroupedMLP` concatenates the matrices of a layer's experts, each transposed, in a tensor of another shape (Megatron
    Core 0.5 to 0.16.1, `moe/experts.py`: `weight1.view(num_local_experts, hidden_size, -1)`).
    """
    joined = JOINED_EXPERTS.fullmatch(key)
    if joined is None:
        yield name_of_weight(key), LocalTensor(key, view)
        return
    count = (args.get("num_experts") or 0) // (args.get("expert_model_parallel_size") or 1)
    along = 1 if joined[2] == "1" else 0
    if not count or len(view.shape) != 2 or view.shape[along] % count:
        raise UnreadableCheckpoint(f"`{key}` of {where}, {list(view.shape)}, does not hold {count} experts")
    shape = (view.shape[0], view.shape[1] // count) if joined[2] == "1" else (view.shape[0] // count, view.shape[1])
    size = Box.whole(shape).numel * view.itemsize
    for expert in range(count):
        one = View.of(view.path, view.offset + expert * size, TensorMeta(shape, view.dtype))
        name = f"{name_of_weight(joined[1])}local_experts.{expert}.linear_fc{joined[2]}.weight"
        yield name, LocalTensor(f"{key}, expert {expert}", one.transposed, joined=key)


def _old_chunk(model: Mapping[str, Any], version: float, args: Mapping[str, Any]) -> Chunk:
    """Return the chunk of an old model; the optimizer's states have the same order of q, k and v."""
    tp = args.get("tensor_model_parallel_size") or args.get("model_parallel_size") or 1
    heads, kv_channels = args["num_attention_heads"], args.get("kv_channels")
    arrange = functools.partial(
        old_classes.qkv_slots,
        version=version,
        heads=heads // tp,
        kv_channels=kv_channels or args["hidden_size"] // heads,
    )
    return {
        name: LocalTensor(name, view, arrange if old_classes.QKV in name else as_it_is)
        for name, view in old_classes.named(model).items()
    }


def num_layers_of(chunk: Chunk, where: str) -> int:
    """Return the number of decoder layers in a chunk; they are numbered from 0 in each chunk.

    Raises:
        UnreadableCheckpoint: a number is missing.
    """
    numbers = {int(matched[1]) for matched in map(LAYER.match, chunk) if matched is not None}
    if numbers != set(range(len(numbers))):
        raise UnreadableCheckpoint(f"{where} holds the layers {sorted(numbers)}, which leave numbers out")
    return len(numbers)
