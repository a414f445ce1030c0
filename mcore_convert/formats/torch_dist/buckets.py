"""The form `dp_reshardable` of the distributed optimizer's state: flat buckets, matched by the order of the modules.

A data-parallel group (one per tensor and pipeline rank, and per expert rank if experts have their own optimizer) has
one buffer per model chunk and dtype, cut into buckets. A bucket holds parameters in the reverse of their order in the
module, each at a multiple of 64 elements (Megatron Core, `param_and_grad_buffer.py`, `_ParamAndGradBuffer`;
`distrib_optimizer.py`, `sharded_param_state_dp_reshardable`). Names are not stored. The order is that of one of
Megatron's layer specs, which is determined by comparing master copies with the model's weights.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from mcore_convert.errors import UnreadableCheckpoint
from mcore_convert.formats.base import Findings
from mcore_convert.formats.files import dcp
from mcore_convert.formats.megatron.flat import slots_of_flat
from mcore_convert.formats.megatron.module_buffers import Buffer, Misfit, Place, Run, Stretch, arranged, orders_of
from mcore_convert.formats.megatron.remainders import whole_masters
from mcore_convert.formats.megatron.tolerances import PACKED, is_quantised, refuse_remainders, tolerance_of
from mcore_convert.formats.torch_dist.keys import StateKeys
from mcore_convert.spec import gpt
from mcore_convert.spec.config import arguments
from mcore_convert.spec.dims import Dims
from mcore_convert.spec.family import Item, Weight
from mcore_convert.spec.names import MASTER, MOMENTS, Index
from mcore_convert.spec.shard import Box
from mcore_convert.storage.elements import Files
from mcore_convert.storage.joining import REMAINDER
from mcore_convert.storage.rounding import Tolerance, are_masters
from mcore_convert.storage.views import Slot, View, cut

BUCKET_KEY = re.compile(
    r"(?:chained_(?P<chain>\d+)\.)?optimizer\.distributed\.dp_group_idx_(?P<group>\d+)\.gbuf_idx_(?P<buffer>\d+)"
    r"\.dtype_\((?:torch\.)?(?P<dtype>\w+),[^)]*\)\.bucket_idx_(?P<bucket>\d+)\.(?P<kind>\w+)"
)
KINDS = {MASTER: "param"} | {moment: moment for moment in MOMENTS}
PROBE = 64  # elements of each parameter that are compared to determine the order
WITHOUT = "leave the optimizer state behind with --no-optimizer"


@dataclass(frozen=True)
class BucketState:
    """Optimizer state in buckets. `keys` has the key on disk of each kind of state in each bucket.

    `others`: momentums of another, chained optimizer, such as Muon; its weights are in no bucket.
    """

    directory: dcp.Directory
    keys: Mapping[Place, Mapping[str, str]]
    weights: StateKeys
    stored_args: Mapping[str, Any] | None
    others: StateKeys | None = None
    matched_by_order = True

    @property
    def states(self) -> tuple[str, ...]:
        """States of every trained weight."""
        kinds = set().union(*(by_kind.keys() for by_kind in self.keys.values()))
        return tuple(state for state, kind in KINDS.items() if kind in kinds)

    def keeps(self, item: Item, dims: Dims) -> bool:
        """Return whether the state exists: buckets have all states of all their parameters."""
        return item.state in self.states

    def locate(self, item: Item, dims: Dims, findings: Findings) -> list[Slot]:
        """Return the boxes of one state of one weight; vocabulary rows include their padding."""
        slots = []
        stretches = self._stretches.get((item.weight.mcore or "", item.at), [])
        for each in stretches:
            if not each.is_replica:
                findings.used.add(self.keys[each.place][KINDS[item.state]])
                slots += self._slots(each, item.state)
        if not stretches:
            findings.missing.append(str(item))
        return self._whole(item, dims, slots, findings)

    def replicas(self, item: Item, dims: Dims) -> Iterator[tuple[Slot, str]]:
        """Yield the copies on other tensor-parallel ranks, and that of a tied embedding on the last stage."""
        for each in self._stretches.get((item.weight.mcore or "", item.at), []):
            if each.is_replica:
                for slot in self._whole(item, dims, self._slots(each, item.state), Findings()):
                    yield slot, f"{each.rank} holds another value of its optimizer state"

    def _whole(self, item: Item, dims: Dims, slots: list[Slot], findings: Findings) -> list[Slot]:
        """Return the slots, with remainders joined with their weights."""
        if item.state != MASTER:
            return slots
        weights = partial(self.weights.locate, item.weight, item.at, dims, findings)
        return whole_masters(slots, weights, gathered=False)

    @cached_property
    def run(self) -> Run:
        """Model and layout of the run that saved the buckets.

        Raises:
            UnreadableCheckpoint: its arguments are not stored, or describe unknown weights.
        """
        where = f"the optimizer state in `{self.directory.path}`"
        if self.stored_args is None:
            raise UnreadableCheckpoint(f"{where} cannot be found: the run's arguments are not stored", hint=WITHOUT)
        args = arguments.normalise(self.stored_args)
        reasons = gpt.refusals(args)
        if reasons:
            raise UnreadableCheckpoint(
                f"{where} cannot be found: the weights of such a model are not known", items=reasons, hint=WITHOUT
            )
        padded = self.weights.tensors[gpt.EMBEDDING].shape[0]
        dims = Dims.of(args, vocab_size=padded, padded_vocab_size=padded)
        rows = [weight for weight in gpt.weights(args) if weight.trained]
        return Run.of(args, dims, [row for row in rows if not self._is_of_others(row, dims)])

    def _is_of_others(self, weight: Weight, dims: Dims) -> bool:
        layers = weight.layers(dims) if weight.per_layer else [None]
        places = (at for layer in layers for at in weight.at(layer, dims))
        return self.others is not None and any(self.others.holds(weight, at) for at in places)

    @cached_property
    def _stretches(self) -> Mapping[tuple[str, Index], list[Stretch]]:
        """Places of every parameter, in the only order that a sample of the data confirms.

        Raises:
            UnreadableCheckpoint: the parameters fit the buckets and round to the weights in no known order; or in
                several, for remainders, which fit any weight.
        """
        buffers = self._buffers()
        if self._keeps_remainders:
            refuse_remainders(self.stored_args or {}, self.directory.path)
        reasons = []
        fitting: dict[str, Mapping[tuple[str, Index], list[Stretch]]] = {}
        for order in orders_of(self.run):
            try:
                stretches = arranged(self.run, order, buffers, self._dtype_of)
                (self._check_bounds if self._keeps_remainders else self._probe)(stretches)
            except Misfit as misfit:
                reasons.append(f"{order}: {misfit}")
            else:
                if not self._keeps_remainders:
                    return stretches
                if stretches not in fitting.values():
                    fitting[str(order)] = stretches
        if len(fitting) == 1:
            return next(iter(fitting.values()))
        if fitting:
            raise UnreadableCheckpoint(
                f"the optimizer state in `{self.directory.path}` fits in several orders, and master weights kept as "
                "remainders do not tell which is right",
                items=list(fitting),
                hint=f"save it again without `store_param_remainders`, or {WITHOUT}",
            )
        raise UnreadableCheckpoint(
            f"the optimizer state in `{self.directory.path}` is not in the order of any known layer spec",
            items=reasons,
            hint=f"save it again with --dist-ckpt-optim-fully-reshardable, or {WITHOUT}",
        )

    def _dtype_of(self, weight: Weight, at: Index) -> str | None:
        """Return the dtype of a weight in a buffer; quantised weights are saved dequantised."""
        packed = is_quantised(self.stored_args or {}, weight, at)
        return PACKED if packed else self.weights.dtype_of(weight, at)

    def _buffers(self) -> dict[tuple[int, int, int], Buffer]:
        """Return the sizes of the buckets of each buffer, without the padding at their ends."""
        buffers: dict[tuple[int, int, int], Buffer] = {}
        kinds = {KINDS[state] for state in self.states}
        for place, by_kind in sorted(self.keys.items()):
            number = place[3]
            sizes = {self.directory.tensors[key].shape for key in by_kind.values()}
            dtypes = {match["dtype"] for key in by_kind.values() if (match := BUCKET_KEY.search(key))}
            known = buffers.setdefault((place[0], place[1], place[2]), Buffer(min(dtypes), []))
            if set(by_kind) != kinds or len(sizes) != 1 or len(known.sizes) != number or dtypes != {known.dtype}:
                raise UnreadableCheckpoint(
                    f"the optimizer state in `{self.directory.path}` is not whole",
                    items=[f"{key} {list(self.directory.tensors[key].shape)}" for key in by_kind.values()],
                )
            ((size,),) = sizes
            known.sizes.append(size)
        return buffers

    @cached_property
    def _keeps_remainders(self) -> bool:
        kind = KINDS[MASTER]
        return any(self.directory.tensors[keys[kind]].dtype == REMAINDER for keys in self.keys.values() if kind in keys)

    def _check_bounds(self, stretches_of: Mapping[tuple[str, Index], list[Stretch]]) -> None:
        """Check that every parameter begins and ends at the bounds of chunks, since each was saved separately.

        Used for remainders: joined with any weight, a remainder rounds to that weight.

        Raises:
            Misfit: a parameter does not.
        """
        for stretch in (stretch for places in stretches_of.values() for stretch in places):
            key = self.keys[stretch.place][KINDS[self.states[0]]]
            if key not in self._bounds:
                spans = ((chunk.box.offsets[0], chunk.box.sizes[0]) for chunk in self.directory.chunks[key])
                self._bounds[key] = {bound for start, size in spans for bound in (start, start + size)}
            if not {stretch.start, stretch.start + stretch.local.numel} <= self._bounds[key]:
                raise Misfit(f"`{stretch.name}` on {stretch.rank} does not begin and end where a tensor was saved")

    @cached_property
    def _bounds(self) -> dict[str, set[int]]:
        return {}

    def _probe(self, stretches: Mapping[tuple[str, Index], list[Stretch]]) -> None:
        """Check for the first elements of every parameter that its master copy rounds to the weight.

        Raises:
            Misfit: a master copy does not.
        """
        rows = {weight.mcore: weight for weight in self.run.rows}
        with Files() as files:
            for (name, at), places in stretches.items():
                weights = self.weights.locate(rows[name], at, self.run.dims, Findings())
                near = tolerance_of(self.stored_args or {}, rows[name], at)
                for stretch in places:
                    for master in self._slots(stretch, MASTER, PROBE):
                        if not all(_rounds_to(files, master, part, near) for part in cut(weights, master.box)):
                            raise Misfit(f"the master copy of `{stretch.name}` on {stretch.rank} does not round to it")

    def _slots(self, stretch: Stretch, state: str, count: int | None = None) -> list[Slot]:
        """Return the slots of one parameter on one rank, or of its first elements."""
        end = stretch.start + stretch.local.numel if count is None else stretch.start + min(count, stretch.local.numel)
        key = self.keys[stretch.place][KINDS[state]]
        return slots_of_flat(list(self._pieces(key, stretch.start, end)), stretch.start, stretch.local)

    def _pieces(self, key: str, start: int, end: int) -> Iterator[tuple[int, View]]:
        """Yield a range of a bucket as one-dimensional views, each with its offset.
        Headers of padding are not read.
        """
        if key not in self._chunks:
            chunks = sorted(self.directory.chunks[key], key=lambda chunk: chunk.box.offsets)
            self._chunks[key] = chunks, [chunk.box.offsets[0] for chunk in chunks], {}
        chunks, offsets, views = self._chunks[key]
        for number in range(max(0, bisect_right(offsets, start) - 1), len(chunks)):
            (offset,), (size,) = chunks[number].box
            low, high = max(offset, start), min(offset + size, end)
            if offset >= end:
                break
            if low < high:
                view = views.get(number) or views.setdefault(number, self.directory.view(key, chunks[number]))
                yield low, view.narrow(Box((low - offset,), (high - low,)))

    @cached_property
    def _chunks(self) -> dict[str, tuple[list[dcp.Chunk], list[int], dict[int, View]]]:
        return {}


def _rounds_to(files: Files, master: Slot, weight: Slot, near: Tolerance | None) -> bool:
    """Return whether a master copy rounds to a weight, which lies within its box."""
    view = master.part(weight.box)
    values, wanted = files.read(view), files.read(weight.view)
    if view.dtype == weight.view.dtype:
        return bool((values == wanted).all())
    return are_masters(values, wanted, weight.view.dtype, near)
