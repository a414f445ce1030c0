"""The tensors of a checkpoint by name, in the order of the forward pass, with the slots of their elements.

For a known model these are the global tensors of its weights under Megatron's names, whatever the format; for a Hugging
Face model that no family reads, the tensors as they are stored. Reads headers only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from mcore_convert.checkpoints.identify import Model, Opened
from mcore_convert.checkpoints.weights import find_weights
from mcore_convert.errors import ConfigError, VerificationError
from mcore_convert.formats.base import Checkpoint, Side
from mcore_convert.spec import gpt
from mcore_convert.spec.family import Family, Item
from mcore_convert.spec.names import PARAM, Index, spell
from mcore_convert.spec.shard import Box, Shape
from mcore_convert.storage.views import Slot

LAYER = re.compile(r"(?:^|\.)(?:layers|layer|h|blocks|block)\.(\d+)\.")
EXPERT = re.compile(r"\.experts\.(\d+)\.")


class Tensor(NamedTuple):
    """A tensor and the slots that hold it. `weight` is its name with placeholders for the layer and the expert.

    `required`: without it the model is another model. The others must be zero, and Megatron has no place for them.
    """

    weight: str
    at: Index
    state: str
    shape: Shape
    slots: tuple[Slot, ...]
    required: bool = True

    @property
    def key(self) -> tuple[str, Index, str]:
        """Key by which two checkpoints of one model pair their tensors."""
        return self.weight, self.at, self.state

    @property
    def name(self) -> str:
        """Name such as `decoder.layers.3.mlp.linear_fc1.weight`, followed by the state unless it is the parameter."""
        spelled = spell(self.weight, self.at)
        return spelled if self.state == PARAM else f"{spelled} ({self.state})"

    @property
    def dtype(self) -> str:
        return self.slots[0].view.dtype

    @property
    def nbytes(self) -> int:
        return sum(slot.view.nbytes for slot in self.slots)


@dataclass(frozen=True)
class Contents(Opened):
    """Open checkpoint with its tensors."""

    tensors: tuple[Tensor, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


def contents_of(opened: Opened, *, optimizer: bool = False) -> Contents:
    """Find every tensor of a checkpoint.

    Args:
        optimizer: include the states of the optimizer, if it has some.

    Raises:
        ConvertError: it is incomplete, its weights are not those of its configuration, or it is a Megatron model whose
            weights are not known.
    """
    checkpoint, model = opened.checkpoint, opened.model
    if model is None:
        if not checkpoint.whole_views:
            raise opened.error or ConfigError(f"the weights in `{checkpoint.path}` are not known")
        return replace(stored_contents(checkpoint), error=opened.error)
    checkpoint.check_whole()
    family = family_of(model)
    states = checkpoint.states if optimizer else (PARAM,)
    located = find_weights(family, model.dims, checkpoint, states, allow_drift=True).slots
    own = {item: slots for item, slots in located.items() if slots and item.weight.copy_of is None}
    tensors = tuple(_tensor(item, slots, model, family) for item, slots in own.items())
    return Contents(checkpoint, model, tensors=tensors)


def stored_contents(checkpoint: Checkpoint) -> Contents:
    """Return the tensors that are each stored in one piece, as stored, for any model."""
    return Contents(checkpoint, None, tensors=tuple(_stored(checkpoint)))


def family_of(model: Model) -> Family:
    """Return the rows of a model: those of its family for Hugging Face, else those of any GPT model (the same rows)."""
    return model.family if model.checkpoint.side is Side.HUGGING_FACE else gpt.family(model.args)


def _tensor(item: Item, slots: list[Slot], model: Model, family: Family) -> Tensor:
    weight, at, state = item
    shape = family.shape(weight, model.dims)
    return Tensor(weight.name, at, state, shape, tuple(slots), required=weight.mcore is not None)


def _stored(checkpoint: Checkpoint) -> list[Tensor]:
    """Return the tensors of a directory under their own names, layer by layer."""
    stored = []
    for name, view in checkpoint.whole_views.items():
        weight, expert = _without_number(EXPERT, name, "{expert}")
        weight, layer = _without_number(LAYER, weight, "{layer}")
        stored.append(Tensor(weight, Index(layer, expert), PARAM, view.shape, (Slot(view, Box.whole(view.shape)),)))
    order = {weight: number for number, weight in enumerate(dict.fromkeys(tensor.weight for tensor in stored))}
    layers = min((order[tensor.weight] for tensor in stored if tensor.at.layer is not None), default=0)

    def place(tensor: Tensor) -> tuple[int, int, int, int]:
        """Return the sort key of a tensor: the files sort by name, which puts layer 10 before layer 2."""
        at, number = tensor.at, order[tensor.weight]
        return (number if at.layer is None else layers, at.layer or 0, number, at.expert or 0)

    return sorted(stored, key=place)


def _without_number(pattern: re.Pattern[str], name: str, placeholder: str) -> tuple[str, int | None]:
    """Return a name with a placeholder for the number that the pattern matches, and that number."""
    matched = pattern.search(name)
    if matched is None:
        return name, None
    return name[: matched.start(1)] + placeholder + name[matched.end(1) :], int(matched[1])


def paired(a: Contents, b: Contents) -> tuple[list[tuple[Tensor, Tensor]], list[Tensor], list[Tensor]]:
    """Return the pairs of tensors that both have, in the order of the first; then the tensors of only one of them.

    Raises:
        VerificationError: a tensor has two shapes.
    """
    mine: Mapping[tuple[str, Index, str], Tensor] = {tensor.key: tensor for tensor in a.tensors}
    theirs = {tensor.key: tensor for tensor in b.tensors}
    both = [(tensor, theirs[key]) for key, tensor in mine.items() if key in theirs]
    misshapen = [f"{x.name}: {list(x.shape)} and {list(y.shape)}" for x, y in both if x.shape != y.shape]
    if misshapen:
        raise VerificationError("the models have weights of different shapes", items=misshapen)
    return (
        both,
        [tensor for key, tensor in mine.items() if key not in theirs],
        [tensor for key, tensor in theirs.items() if key not in mine],
    )
