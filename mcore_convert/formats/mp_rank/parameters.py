"""The trained parameters of a rank: their order, the optimizers and groups that they are dealt to, their flat buffers.

What reads optimizer state and what writes it agree on this.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from mcore_convert.formats.megatron.flat import ALIGNMENT
from mcore_convert.formats.mp_rank.rank_file import LocalTensor, RankFile
from mcore_convert.spec.gpt import EMBEDDING, OUTPUT
from mcore_convert.spec.names import EXP_AVG, EXP_AVG_SQ

MOMENTS = (EXP_AVG, EXP_AVG_SQ)
FLOAT16 = ("float16", "bfloat16")
BUFFERS = re.compile(r"\.(expert_bias|local_tokens_per_expert)$")  # in a state dict, but no parameters
EXPERTS = ".mlp.experts."
EMBEDDING_OR_OUTPUT = (EMBEDDING, OUTPUT)


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


def is_undecayed(parameter: Parameter) -> bool:
    """Whether weight decay passes it by: norms and biases (Megatron Core, `get_standard_config_overrides`)."""
    return len(parameter.local.view.shape) == 1 or parameter.name.endswith(".bias")


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
    apart = args.get("decoupled_lr")
    kinds = [
        (group.get("wd_mult") == 0, bool(group.get("is_decoupled_lr") or (apart and group.get("max_lr") == apart)))
        for group in groups
    ]
    return [
        [
            parameter
            for parameter in parameters
            if kind == (is_undecayed(parameter), bool(apart) and parameter.name in EMBEDDING_OR_OUTPUT)
        ]
        for kind in kinds
    ]


def by_buffer(parameters: Iterable[Parameter]) -> dict[tuple[int, str], list[Parameter]]:
    """The parameters of each flat buffer, in the order of the modules: one for each chunk and dtype."""
    kinds: dict[tuple[int, str], list[Parameter]] = {}
    for parameter in parameters:
        kinds.setdefault((parameter.chunk, parameter.local.view.dtype), []).append(parameter)
    return kinds


def are_shared(parameter: Parameter, args: Mapping[str, Any]) -> bool:
    """Whether it is an embedding of which another pipeline stage has a copy."""
    if (args.get("pipeline_model_parallel_size") or 1) == 1:
        return False
    tied = not args.get("untie_embeddings_and_output_weights")
    copied = args.get("mtp_num_layers") and parameter.name == EMBEDDING
    return bool(copied or (tied and parameter.name in EMBEDDING_OR_OUTPUT))


def bucket_size_of(args: Mapping[str, Any]) -> int:
    """What a bucket holds at least, in elements (Megatron Core, `DistributedDataParallel`)."""
    size: int = args.get("ddp_bucket_size") or max(40_000_000, 1_000_000 * (args.get("data_parallel_size") or 1))
    return size
