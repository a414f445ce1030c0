"""The weights of a model in a checkpoint: their slots, and the checks that their data must pass before use.

Reads headers only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from mcore_convert.checkpoints.checks import Check
from mcore_convert.errors import MappingError, counted, fold
from mcore_convert.formats.base import Checkpoint, Findings
from mcore_convert.spec.config.arguments import DTYPES
from mcore_convert.spec.dims import Dims
from mcore_convert.spec.family import Family, Item, Weight
from mcore_convert.spec.gpt import EMBEDDING, OUTPUT
from mcore_convert.spec.names import MASTER, PARAM, Index, match
from mcore_convert.spec.shard import Box
from mcore_convert.spec.tiling import untiled
from mcore_convert.storage.joining import REMAINDER
from mcore_convert.storage.views import Slot, cut

CONVERTED = frozenset(DTYPES)
DRIFT_HINT = "old runs drift a little: --allow-drift takes the first rank's copy"
ALONE_HINT = "the optimizer's state is not that of these weights: --no-optimizer takes the weights alone"


@dataclass(frozen=True)
class Sources:
    """Located weights of a checkpoint: their slots without padding, and the checks of their data.

    `names` are the tensors of the checkpoint that each weight is made of.
    """

    slots: Mapping[Item, list[Slot]]
    checks: tuple[Check, ...]
    names: Mapping[Item, Collection[str]]

    @cached_property
    def dtype_of(self) -> dict[Item, str]:
        """Dtype of every weight; for one that the source lacks, as a must-be-zero row, that of the weight before it."""
        dtypes: dict[Item, str] = {}
        last = "float32"
        for key, slots in self.slots.items():
            last = slots[0].view.dtype if slots else last
            dtypes[key] = last
        return dtypes

    def in_masters(self, source: Checkpoint) -> Sources:
        """Return the sources without weights that have a master copy, and with checks that it rounds to its weight."""
        left = {item for item in self.slots if item.state == PARAM and item._replace(state=MASTER) in self.slots}
        known = {(check.view, check.other) for check in self.checks if check.rounded}
        checks = [check for check in master_checks(self.slots, source) if (check.view, check.other) not in known]
        slots = {item: places for item, places in self.slots.items() if item not in left}
        return Sources(slots, (*self.checks, *checks), self.names)


def find_weights(
    family: Family,
    dims: Dims,
    source: Checkpoint,
    states: Sequence[str] = (PARAM,),
    *,
    allow_drift: bool = False,
) -> Sources:
    """Locate every weight of the model in a checkpoint, and a weight for every tensor of the checkpoint.

    Args:
        states: the states to locate for each weight; an optimizer keeps none for a buffer.
        allow_drift: use the first rank's copy where several ranks hold one, without a check that the others agree.

    Raises:
        MappingError: weights that are missing, have another shape, mixed dtypes or incomplete parts; tensors without
            a place in the family. All problems of the first kind that occurs are in one message.
    """
    findings = Findings()
    slots: dict[Item, list[Slot]] = {}
    checks: list[Check] = []
    names: dict[Item, Collection[str]] = {}
    broken = []
    for item in (item for item in items_of(family, dims, states) if source.keeps(item, dims)):
        if item.weight.copy_of is not None:
            slots[item], names[item] = slots[family.original_of(item)], names[family.original_of(item)]
            checks += _copy_checks(item, dims, source, slots[item], findings)
            continue
        own = Findings()
        places = without_padding(item.weight, dims, source.locate(item, dims, own))
        findings.add(own)
        slots[item], names[item] = places, tuple(own.used)
        if not places:
            continue
        reason = untiled([slot.box for slot in places], family.shape(item.weight, dims))
        dtypes = {slot.view.dtype for slot in places}
        if reason is not None:
            broken.append(f"{item}: {reason}")
        if not dtypes <= CONVERTED:
            why = "only float32, float16 and bfloat16 are" if "float64" in dtypes else "codes without scales are not"
            broken.append(f"{item} is stored as {' and '.join(sorted(dtypes))}: {why} converted")
        elif len(dtypes) > 1:
            broken.append(f"{item} is made of {' and '.join(sorted(dtypes))} parts")
        if item.weight.mcore is None:
            failure = f"`{item}` in `{source.path}` is not zero, and Megatron Core has no place for it"
            checks += [Check(slot.view, None, failure) for slot in places]
        for replica, where in () if allow_drift else source.replicas(item, dims):
            failure = f"the ranks do not agree on `{item}`: {where} differs from the first"
            checks += equal_checks(replica, places, failure, hint=DRIFT_HINT)
    if source.matched_by_order:
        checks += master_checks(slots, source)
    checks += _tied_checks(family, dims, source, slots, findings)
    _refuse(family, source, findings, broken)
    return Sources(slots, tuple(checks), names)


def find_masters(family: Family, dims: Dims, source: Checkpoint, *, allow_drift: bool = False) -> Sources:
    """Locate the master copy of every weight in its place, proven to round to it; an untrained weight has none.

    Raises:
        MappingError: as `find_weights`; or the checkpoint has no master copies.
    """
    if MASTER not in source.states:
        raise MappingError(
            f"`{source.path}` holds no master copies of its weights",
            hint="leave out --from-master: an optimizer keeps them for weights in bfloat16 or float16 alone",
        )
    both = find_weights(family, dims, source, (PARAM, MASTER), allow_drift=allow_drift)
    taken = {
        item: both.slots.get(item._replace(state=MASTER), slots)
        for item, slots in both.slots.items()
        if item.state == PARAM
    }
    proofs = () if source.matched_by_order else tuple(master_checks(both.slots, source))
    names = {item: both.names.get(item._replace(state=MASTER), both.names[item]) for item in taken}
    return Sources(taken, (*both.checks, *proofs), names)


def master_checks(slots: Mapping[Item, list[Slot]], source: Checkpoint) -> Iterator[Check]:
    """Yield the checks that every master copy rounds to its weight: the proof that state matched by order is right."""
    for item, masters in slots.items():
        if item.state == MASTER:
            param = item._replace(state=PARAM)
            failure = f"the master copy of `{param}` does not round to the weight"
            for slot in masters:
                if slot.view.low_dtype == REMAINDER:  # a remainder always rounds to the weight that it is joined with
                    continue
                for check in equal_checks(slot, slots[param], failure, hint=ALONE_HINT):
                    if check.view == check.other:  # weight and master copy are the same bytes
                        continue
                    rounded = check.other is not None and check.view.dtype != check.other.dtype
                    yield replace(check, rounded=rounded, near=source.tolerance(item) if rounded else None)


def items_of(family: Family, dims: Dims, states: Sequence[str]) -> Iterator[Item]:
    """Yield every tensor of a model in these states, weight by weight, in the order of the forward pass."""
    for weight, at in family.instances(dims):
        for state in states if weight.trained and weight.mcore is not None else states[:1]:
            yield Item(weight, at, state)


def equal_checks(replica: Slot, slots: list[Slot], failure: str, *, hint: str | None = None) -> Iterator[Check]:
    """Yield the checks that a slot equals the slots of the same box."""
    for part in cut(slots, replica.box):
        yield Check(replica.part(part.box), part.view, failure, hint=hint)


def _copy_checks(item: Item, dims: Dims, source: Checkpoint, slots: list[Slot], findings: Findings) -> Iterator[Check]:
    """Yield the checks of a copy of a weight: it may be absent, otherwise it must equal the weight."""
    there = Findings()
    places = source.locate(item, dims, there)
    if there.missing or not there.used:
        return
    findings.add(there)
    failure = f"`{item}` in `{source.path}` differs from the `{item.weight.copy_of}` that it should be a copy of"
    for slot in places:
        yield from equal_checks(slot, slots, failure)


def _tied_checks(
    family: Family, dims: Dims, source: Checkpoint, slots: Mapping[Item, list[Slot]], findings: Findings
) -> Iterator[Check]:
    """Yield the checks of the head of a tied model: it may be stored nevertheless, and must equal the embedding."""
    if not dims.tied:
        return
    rows = {weight.mcore: weight for weight in family.weights}
    if OUTPUT not in rows or EMBEDDING not in rows:
        return
    head, embedding = rows[OUTPUT], rows[EMBEDDING]
    there = Findings()
    places = without_padding(head, dims, source.locate(Item(head, Index()), dims, there))
    if there.missing:
        return
    findings.add(there)
    failure = f"the model in `{source.path}` is tied, but its `{next(iter(there.used))}` differs from its embedding"
    for slot in places:
        yield from equal_checks(slot, slots[Item(embedding, Index())], failure)


def _refuse(family: Family, source: Checkpoint, findings: Findings, broken: list[str]) -> None:
    where, name = f"`{source.path}`", f"`{family.name}`"
    unused = [key for key in source.tensors if key not in findings.used and not _ignored(family, key)]
    # All layers look up the same stacked key, so a problem with it is found once for each layer.
    missing, misshapen = list(dict.fromkeys(findings.missing)), list(dict.fromkeys(findings.misshapen))
    if missing:
        both = [f"{key} (has no place)" for key in fold(unused)]
        raise MappingError(
            counted(len(missing), f"weight of family {name} is missing", f"weights of family {name} are missing")
            + f" in {where}",
            items=[*fold(missing), *both],
        )
    if unused:
        raise MappingError(
            counted(len(unused), f"key in {where} has no place", f"keys in {where} have no place")
            + f" in family {name}",
            items=fold(unused),
            hint="nothing is dropped in silence: is this another family, or a model with additions?",
        )
    if misshapen:
        raise MappingError(
            counted(len(misshapen), f"weight in {where} does not have", f"weights in {where} do not have")
            + " the shape that its configuration demands",
            items=misshapen,
        )
    if broken:
        raise MappingError(
            f"{counted(len(broken), 'weight', 'weights')} in {where} cannot be taken as stored", items=fold(broken)
        )


def _ignored(family: Family, key: str) -> bool:
    prefix = family.optional_prefix
    return any(match(t, key) is not None or match(t.removeprefix(prefix), key) is not None for t in family.ignore)


def without_padding(weight: Weight, dims: Dims, slots: list[Slot]) -> list[Slot]:
    """Return slots cut down to the part that is not padding of the vocabulary."""
    return cut(slots, Box.whole(dims.shape(weight.shape))) if weight.vocab else slots
