"""Equality of two checkpoints in any two formats: as global tensors bit for bit, and as the functions they compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from mcore_convert.checkpoints.checks import prove
from mcore_convert.checkpoints.checksums import check_sums
from mcore_convert.checkpoints.identify import Model
from mcore_convert.checkpoints.weights import Sources, find_weights
from mcore_convert.comparison.change import Gap, gaps_between
from mcore_convert.comparison.logits import LogitsReport, compare_logits
from mcore_convert.errors import VerificationError
from mcore_convert.formats.base import Side
from mcore_convert.spec import gpt
from mcore_convert.spec.config.neutral import NEUTRAL, NEUTRAL_OF_EXPERTS
from mcore_convert.spec.family import Family, Item
from mcore_convert.spec.names import PARAM
from mcore_convert.storage.codecs import Blocks
from mcore_convert.storage.elements import CAST_BLOCK, Files, blocks_of
from mcore_convert.storage.phases import phase
from mcore_convert.storage.progress import Meter, Progress
from mcore_convert.storage.views import Slot, cut

# Fields of a configuration without effect on the function: how it is stored, and what training does.
NO_FUNCTION = ("torch_dtype", "architectures", "model_type")


@dataclass(frozen=True)
class Difference:
    """Weight that is not bit-equal on both sides.

    `num_elements` differ, by at most `largest` (NaN where one of them is); `dtypes` are those of both sides. `is_loss`:
    one side is quantised, and each of its elements may be the rounded element of the other.
    """

    name: str
    num_elements: int
    largest: float
    dtypes: tuple[str, str]
    is_loss: bool = False


@dataclass(frozen=True)
class Verification:
    """Result of a comparison."""

    family: str
    num_weights: int
    nbytes: int
    config_differences: tuple[str, ...]
    differences: tuple[Difference, ...]
    notes: tuple[str, ...] = ()
    logits: LogitsReport | None = None

    @property
    def equal(self) -> bool:
        """Whether every weight is bit-equal, the configurations mean the same, and the logits agree."""
        return not self.differences and self._agrees

    @property
    def within_loss(self) -> bool:
        """Whether every difference is within the loss of one side's quantisation."""
        return all(difference.is_loss for difference in self.differences) and self._agrees

    @property
    def with_loss(self) -> bool:
        """Whether a weight differs by a loss: one side is quantised, and each element may be the other's, rounded."""
        return any(difference.is_loss for difference in self.differences)

    @property
    def _agrees(self) -> bool:
        within = self.logits is None or self.logits.within
        return not self.config_differences and within


def compare(a: Model, b: Model, *, tolerance: float | None = None, progress: Progress | None = None) -> Verification:
    """Compare the weights and configurations of two checkpoints; of two Megatron ones, the optimizer state as well.

    Vocabulary padding is left out, and a tied head counts as the embedding.

    Args:
        tolerance: also compare the logits, which may differ by this share of the largest one.

    Raises:
        ConvertError: one of them is incomplete, or contradicts itself.
        VerificationError: they are models of different families or sizes.
    """
    if a.family.name != b.family.name:
        raise VerificationError(f"a `{a.family.name}` cannot be compared with a `{b.family.name}`")
    if sizes_of(a) != sizes_of(b):
        sizes, others = sizes_of(a), sizes_of(b)
        items = [f"{name}: {sizes[name]} and {others[name]}" for name in sizes if sizes[name] != others[name]]
        raise VerificationError("the models have different sizes", items=items)
    family, states, notes = _common_ground(a, b)
    with phase(progress, "checking"):
        whole = sources = [_proven_sources(each, family, states) for each in (a, b)]
        if a.checkpoint.weights_are_masters != b.checkpoint.weights_are_masters:
            sources = [each.in_masters(model.checkpoint) for each, model in zip(sources, (a, b), strict=True)]
            prove(check for each in sources for check in each.checks if check.rounded)
        mine, theirs = (each.slots for each in sources)
    apart = sorted({item.state for item in mine.keys() ^ theirs.keys()})
    if apart:  # optimizers chained by kinds of weights
        notes = [*notes, f"only one has {', '.join(apart)} of some weights"]
        mine = {item: slots for item, slots in mine.items() if item in theirs}
    nbytes = [sum(slot.view.nbytes for slots in side.values() for slot in slots) for side in (mine, theirs)]
    with phase(progress, "comparing", sum(nbytes)), Files() as files:
        pairs = ((slots, theirs[item]) for item, slots in mine.items())
        gaps = gaps_between(pairs, files, Meter(sum(nbytes), progress), norms=False)
    with Files() as files:
        differences = [_difference(i, mine[i], theirs[i], gap, files) for i, gap in zip(mine, gaps, strict=True)]
    logits = None if tolerance is None else compare_logits((a, b), whole, tolerance=tolerance, progress=progress)
    return Verification(
        a.family.name,
        len(mine),
        nbytes[0],
        tuple(config_differences(a, b)),
        tuple(difference for difference in differences if difference is not None),
        tuple(dict.fromkeys([*a.notes, *b.notes, *notes, *a.checkpoint.remarks(), *b.checkpoint.remarks()])),
        logits,
    )


def _common_ground(a: Model, b: Model) -> tuple[Family, tuple[str, ...], list[str]]:
    """Return the rows and states in which two checkpoints can be compared, and notes of the states left out."""
    first, second = a.checkpoint, b.checkpoint
    if Side.HUGGING_FACE in (first.side, second.side):
        if a.refusals:
            raise VerificationError(a.refusals[0], items=a.refusals[1:])
        return a.family, (PARAM,), []
    if gpt.weights(a.args) != gpt.weights(b.args):
        raise VerificationError("the models have different weights")
    states = tuple(state for state in first.states if state in second.states)
    left = sorted({*first.states, *second.states} - {*states})
    return gpt.family(a.args), states, [f"only one has {', '.join(left)} of an optimizer"] if left else []


def sizes_of(model: Model) -> Mapping[str, Any]:
    """Return the sizes in which two checkpoints of a model agree, whatever their padding."""
    named = (each.name for each in fields(model.dims))  # not the values computed from them
    return {name: getattr(model.dims, name) for name in named if name != "padded_vocab_size"}


def config_differences(a: Model, b: Model) -> list[str]:
    """Return the differences in meaning of two configurations, one line each."""
    if a.refusals or b.refusals:  # no family can express both as a `config.json`
        first, second = ({name: model.args.get(name) for name in (*NEUTRAL, *NEUTRAL_OF_EXPERTS)} for model in (a, b))
    else:
        first, second = (model.family.config.to_hf(model.args) for model in (a, b))
    names = [name for name in {**first, **second} if name not in NO_FUNCTION]
    return [
        f"`{name}` is {first.get(name)!r} and {second.get(name)!r}"
        for name in names
        if first.get(name) != second.get(name)
    ]


def _proven_sources(model: Model, family: Family, states: tuple[str, ...]) -> Sources:
    """Return the weights of one side, proven consistent: replicas, a tied head, master copies."""
    model.checkpoint.check_whole()
    sources = find_weights(family, model.dims, model.checkpoint, states)
    check_sums(model.checkpoint)
    prove(check for check in sources.checks if check.other is not None)
    return sources


def _difference(item: Item, mine: list[Slot], theirs: list[Slot], gap: Gap, files: Files) -> Difference | None:
    """Return the difference of a weight; None if equal. One that must be zero may be absent on a side, or both."""
    dtypes = [slots[0].view.dtype for slots in (mine or theirs, theirs or mine) if slots]
    if not gap.num_changed and len(set(dtypes)) < 2:
        return None
    is_loss = any(_is_loss(*sides, files) for sides in ((mine, theirs), (theirs, mine)))
    return Difference(str(item), gap.num_changed, gap.largest_apart or gap.largest, (dtypes[0], dtypes[1]), is_loss)


def _is_loss(coded: list[Slot], exact: list[Slot], files: Files) -> bool:
    """Return whether each element of a weight that is quantised on one side may be the rounded element of the other."""
    if not any(slot.view.coded for slot in coded) or not exact or any(slot.view.coded for slot in exact):
        return False
    for slot in coded:
        for part in cut(exact, slot.box):
            view = slot.part(part.box)
            for block in blocks_of(view.shape, view.itemsize, CAST_BLOCK):
                numbers, own = files.read(part.view.block(block), dtype="float32"), view.block(block)
                if isinstance(view.coded, Blocks):
                    same = view.coded.may_hold(files, own, numbers.view(np.float32))
                else:
                    same = files.read(own, dtype="float32") == numbers
                if not same.all():
                    return False
    return True
