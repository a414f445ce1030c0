"""The trained parameters of a rank: their order, the optimizers and groups that they are dealt to, their flat buffers.

What reads optimizer state and what writes it agree on this.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from mcore_convert.formats.megatron.flat import ALIGNMENT
from mcore_convert.formats.megatron.param_groups import kind_of, kinds_of
from mcore_convert.formats.mp_rank.rank_file import LocalTensor, RankFile
from mcore_convert.spec.gpt import EMBEDDING, OUTPUT
from mcore_convert.spec.names import EXP_AVG, EXP_AVG_SQ

MOMENTS = (EXP_AVG, EXP_AVG_SQ)
FLOAT16 = ("float16", "bfloat16")
BUFFERS = re.compile(r"\.(expert_bias|local_tokens_per_expert)$")  # in a state dict, but no parameters
EXPERTS = ".mlp.experts."


class Parameter(NamedTuple):
    """A trained tensor of a rank: its chunk, its name and the tensor."""

    chunk: int
    name: str
    local: LocalTensor


def buffer_starts(sizes: Sequence[int], alone: Sequence[bool], bucket_size: int | None = None) -> tuple[list[int], int]:
    """Where parameters begin in a stored buffer, and its end (Megatron Core, `_ParamAndGradBuffer`).

    The buffer is cut into buckets, and stored without the padding at their ends. An embedding shared between stages
    has a bucket `alone`; with `bucket_size`, a bucket ends once it has so many elements (`--overlap-grad-reduce`).
    """
    starts = [0] * len(sizes)
    base = end = 0  # of the current bucket in what is stored, and within the bucket
    filled = False
    for number in reversed(range(len(sizes))):
        start = -(-end // ALIGNMENT) * ALIGNMENT
        if alone[number] and filled:
            base, start = base + start, 0
        starts[number] = base + start
        end, filled = start + sizes[number], True
        if alone[number] or (bucket_size is not None and end >= bucket_size):
            base, end, filled = base + end, 0, False
    return starts, base + end


def parameters_of(file: RankFile) -> Iterator[Parameter]:
    """The trained tensors of a rank, in the order of its modules."""
    for number, chunk in enumerate(file.chunks):
        for name, local in chunk.items():
            if not BUFFERS.search(name):
                yield Parameter(number, name, local)


def is_expert(parameter: Parameter) -> bool:
    """Whether it belongs to an expert, which has an optimizer of its own under expert parallelism."""
    return EXPERTS in parameter.name


def owned_by(file: RankFile, count: int) -> list[list[Parameter]]:
    """The parameters of each of `count` chained optimizers: under expert parallelism experts have the second."""
    every = list(parameters_of(file))
    if count == 1:
        return [every]
    return [[one for one in every if not is_expert(one)], [one for one in every if is_expert(one)]]


def dealt_to(
    groups: Sequence[Mapping[str, Any]], parameters: list[Parameter], args: Mapping[str, Any]
) -> list[list[Parameter]]:
    """The parameters of each group, in their order: groups differ in weight decay and in a learning rate of their own
    for the embedding and the output layer."""
    if len(groups) == 1:
        return [parameters]
    kinds = [kind_of(parameter.name, len(parameter.local.view.shape), args) for parameter in parameters]
    return [
        [parameter for parameter, own in zip(parameters, kinds, strict=True) if own == kind]
        for kind in kinds_of(groups, args)
    ]


def by_buffer(parameters: Iterable[Parameter]) -> dict[tuple[int, str], list[Parameter]]:
    """The parameters of each flat buffer, in the order of the modules: one for each chunk and dtype."""
    kinds: dict[tuple[int, str], list[Parameter]] = {}
    for parameter in parameters:
        kinds.setdefault((parameter.chunk, parameter.local.view.dtype), []).append(parameter)
    return kinds


def are_shared(parameter: Parameter, args: Mapping[str, Any]) -> bool:
    """Whether it is an embedding of which another pipeline stage has a copy."""
    tied = not args.get("untie_embeddings_and_output_weights")
    return tied and (args.get("pipeline_model_parallel_size") or 1) > 1 and parameter.name in (EMBEDDING, OUTPUT)


def bucket_size_of(args: Mapping[str, Any]) -> int:
    """What a bucket holds at least, in elements (Megatron Core, `DistributedDataParallel`)."""
    size: int = args.get("ddp_bucket_size") or max(40_000_000, 1_000_000 * (args.get("data_parallel_size") or 1))
    return size
