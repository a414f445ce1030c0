"""The places of parameters in Megatron's buffers of parameters and gradients, for every rank of a layout.

Follows Megatron Core 0.15 to 0.19: `param_and_grad_buffer.py` (`_ParamAndGradBuffer`), `distributed_data_parallel.py`
(one buffer per dtype, separate ones for experts that are distributed over ranks) and `optimizer/__init__.py`
(`get_megatron_optimizer`: the chain of optimizers, and the number of a data-parallel group).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from mcore_convert.formats.megatron.flat import ALIGNMENT, Local, local_of
from mcore_convert.formats.megatron.modules import (
    CONVOLUTION,
    GROUPED,
    IMPLEMENTATIONS,
    LOCAL,
    SEQUENTIAL,
    in_module_order,
    shard_of,
)
from mcore_convert.spec.dims import Dims
from mcore_convert.spec.family import Weight
from mcore_convert.spec.gpt import EMBEDDING
from mcore_convert.spec.holding import Holding, is_of_expert
from mcore_convert.spec.layout import Layout, Rank, Stage
from mcore_convert.spec.names import Index, spell
from mcore_convert.spec.releases import NEWEST, OLDEST, OWN_CONVOLUTIONS, Release, spelled

Place = tuple[int, int, int, int]  # optimizer in the chain, data-parallel group, buffer, bucket
DtypeOf = Callable[[Weight, Index], str | None]


class Misfit(Exception):
    """Buckets that do not hold the parameters of a model in some order."""


class Order(NamedTuple):
    """Order of a model's parameters: its layer spec, how its experts are stored, and the release of its modules."""

    implementation: str
    experts: str
    release: Release = NEWEST

    def __str__(self) -> str:
        before = f", of Megatron-LM before {spelled(OWN_CONVOLUTIONS)}" if self.release < OWN_CONVOLUTIONS else ""
        return f"layers of `{self.implementation}`, experts {self.experts}{before}"


@dataclass(frozen=True)
class Buffer:
    """Dtype of the parameters in a buffer, and sizes of its buckets without the padding at their ends."""

    dtype: str
    sizes: list[int]


class Parameter(NamedTuple):
    """One rank's part of a weight. A parameter that two stages have (`shared`) gets a bucket of its own."""

    weight: Weight
    at: Index
    local: Local
    shared: bool


@dataclass(frozen=True)
class Stretch:
    """Place of a parameter: from element `start` of a bucket on. `is_replica`: another rank has the same part."""

    name: str
    place: Place
    start: int
    local: Local
    rank: str
    is_replica: bool


@dataclass(frozen=True)
class Run:
    """Model and layout of a run: its trained rows, its sizes with the padded vocabulary, its stages."""

    rows: Sequence[Weight]
    dims: Dims
    layout: Layout
    stages: Mapping[Stage, range]
    implementation: str | None = None

    @staticmethod
    def of(args: Mapping[str, Any], dims: Dims, rows: Sequence[Weight]) -> Run:
        """Return the run for normalised arguments.

        Raises:
            LayoutError: the layers do not fit the stored layout.
        """
        layout = Layout.of(args)
        return Run(rows, dims, layout, layout.stages(dims.num_layers), args.get("transformer_impl"))

    @property
    def etp(self) -> int:
        """Tensor-parallel size of the experts."""
        return self.layout.expert_tp

    @property
    def has_expert_optimizer(self) -> bool:
        """Whether experts have separate buffers and a separate optimizer: if they are distributed over ranks."""
        return bool(self.dims.num_experts) and self.layout.ep > 1

    @cached_property
    def holding(self) -> Holding:
        """Tensors of each rank."""
        return Holding(self.layout, self.stages)


def orders_of(run: Run) -> list[Order]:
    """Return the orders that a model may have, beginning with that of its arguments."""
    implementations = sorted(IMPLEMENTATIONS, key=lambda name: (name != run.implementation, name == LOCAL))
    experts = (GROUPED, SEQUENTIAL) if run.dims.num_experts else (SEQUENTIAL,)
    has_mixers = any(CONVOLUTION in row.name for row in run.rows)
    releases = (NEWEST, OLDEST) if has_mixers else (NEWEST,)
    return [Order(*each) for each in itertools.product(implementations, experts, releases)]


def arranged(
    run: Run, order: Order, buffers: Mapping[tuple[int, int, int], Buffer], dtype_of: DtypeOf
) -> dict[tuple[str, Index], list[Stretch]]:
    """Return the places of every parameter, by its name in `torch_dist` and its index.

    Args:
        buffers: the buffers by optimizer, data-parallel group and number.
        dtype_of: the dtype of a weight.

    Raises:
        Misfit: the buckets have other sizes.
    """
    stretches: dict[tuple[str, Index], list[Stretch]] = {}
    used = set()
    for chain, group, rank, chunks, is_expert in _optimizers(run, sorted({chain for chain, _, _ in buffers})):
        number = 0
        for stage in chunks:
            by_dtype: dict[str | None, list[Parameter]] = {}
            for each in _parameters(run, order, stage, rank, is_expert):
                by_dtype.setdefault(dtype_of(each.weight, each.at), []).append(each)
            for dtype, parameters in by_dtype.items():
                place = (chain, group, number)
                number += 1
                where = f"buffer {place[2]} of data-parallel group {group}"
                if place not in buffers or buffers[place].dtype != dtype:
                    raise Misfit(f"{where} is {'missing' if place not in buffers else f'not {dtype}'}")
                used.add(place)
                for each, bucket, start in _in_buckets(parameters, buffers[place].sizes, where):
                    _add(stretches, each, (*place, bucket), start, rank)
    if len(used) != len(buffers):
        raise Misfit(f"{len(buffers) - len(used)} of {len(buffers)} buffers belong to no rank")
    return stretches


def _add(
    stretches: dict[tuple[str, Index], list[Stretch]], parameter: Parameter, place: Place, start: int, rank: Rank
) -> None:
    weight, at, local, _ = parameter
    assert weight.mcore is not None
    there = stretches.setdefault((weight.mcore, at), [])
    is_replica = any(each.local == local for each in there)
    named = f"tp = {rank.tp}, pp = {rank.pp}, ep = {rank.ep}"
    there.append(Stretch(spell(weight.mcore, at), place, start, local, named, is_replica))


def _optimizers(run: Run, chain: Sequence[int]) -> Iterator[tuple[int, int, Rank, list[Stage], bool]]:
    """Yield every optimizer of a chain for every data-parallel group, with its model chunks.

    With `--overlap-param-gather-with-optimizer-step`, the first model chunk has an optimizer of its own.
    """
    layout = run.layout
    dense = list(chain)[:-1] if run.has_expert_optimizer else list(chain)
    if len(dense) not in (1, 2) or (run.dims.num_experts and layout.ep == 1 and run.etp != layout.tp):
        raise Misfit(f"{len(chain)} optimizers are chained, and experts are cut for etp = {run.etp}")
    for pp in range(layout.pp):
        chunks = sorted(stage for stage in run.stages if stage.pp == pp)
        parts = [chunks] if len(dense) == 1 else [chunks[:1], chunks[1:]]
        for number, part in zip(dense, parts, strict=True):
            for tp in range(layout.tp):
                yield number, pp * layout.tp + tp, Rank(tp, pp), part, False
        for ep in range(layout.ep) if run.has_expert_optimizer else ():
            for tp in range(run.etp):
                yield chain[-1], (pp * layout.ep + ep) * run.etp + tp, Rank(tp, pp, ep), chunks, True


def _in_buckets(
    parameters: Sequence[Parameter], sizes: Sequence[int], where: str
) -> Iterator[tuple[Parameter, int, int]]:
    """Yield each parameter with its bucket and its offset there.

    A bucket ends where a parameter ends, unless the next one is shared: then it is padded first. So the sizes determine
    its parameters, for any bucket size of the run.
    """
    bucket = end = 0
    for parameter in reversed(parameters):
        start = -(-end // ALIGNMENT) * ALIGNMENT
        if end == sizes[bucket] or (parameter.shared and end and start == sizes[bucket]):
            bucket, start = bucket + 1, 0
        end = start + parameter.local.numel
        if bucket == len(sizes) or end > sizes[bucket]:
            raise Misfit(f"{where} has buckets of {list(sizes)} elements, which do not end between two parameters")
        yield parameter, bucket, start
    if bucket != len(sizes) - 1 or end != sizes[bucket]:
        raise Misfit(f"{where} has buckets of {list(sizes)} elements, its parameters end at {end} of bucket {bucket}")


def _parameters(run: Run, order: Order, stage: Stage, rank: Rank, is_expert: bool) -> Iterator[Parameter]:
    """Yield the parameters of a model chunk in an optimizer of a rank, in the order of `module.parameters()`."""
    rows = in_module_order(run.rows, order.implementation, order.release)
    shares = bool(run.holding.copies_of_embedding(run.dims))
    for weight, at, _, _ in run.holding.held_on(rows, run.dims, stage, rank.ep, grouped=order.experts == GROUPED):
        if run.has_expert_optimizer and is_expert != is_of_expert(weight):
            continue
        tp = run.etp if is_of_expert(weight) else run.layout.tp
        shard = run.dims.sized(shard_of(weight, order.implementation))
        local = local_of(shard, run.dims.shape(weight.shape), tp, rank.tp)
        yield Parameter(weight, at, local, shares and weight.mcore == EMBEDDING)
