"""The trained parameters of a rank: their order, their optimizers and groups, their flat buffers.

Reading and writing optimizer state share this module.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from mcore_convert.formats.base import is_by_momentum
from mcore_convert.formats.megatron.flat import ALIGNMENT
from mcore_convert.formats.megatron.param_groups import kind_of, kinds_of
from mcore_convert.formats.mp_rank.rank_file import LocalTensor, RankFile
from mcore_convert.spec.gpt import EMBEDDING, OUTPUT
from mcore_convert.spec.names import BY_MOMENTUM

Groups = Sequence[Mapping[str, Any]]

FLOAT16 = ("float16", "bfloat16")
BUFFERS = re.compile(r"\.(expert_bias|local_tokens_per_expert)$")  # in a state dict, but not parameters
EXPERTS = ".mlp.experts."
EMBEDDING_OR_OUTPUT = (EMBEDDING, OUTPUT)


class Parameter(NamedTuple):
    """A trained tensor of a rank: its chunk, its name and the tensor."""

    chunk: int
    name: str
    local: LocalTensor


def buffer_starts(sizes: Sequence[int], alone: Sequence[bool], bucket_size: int | None = None) -> tuple[list[int], int]:
    """Return the offsets of parameters in a stored buffer, and its length (Megatron Core, `_ParamAndGradBuffer`).

    The buffer is cut into buckets, and stored without the padding at their ends. An embedding shared between stages
    has a bucket of its own (`alone`); with `bucket_size`, a bucket ends once it has that many elements
    (`--overlap-grad-reduce`).
    """
    starts = [0] * len(sizes)
    base = end = 0  # offset of the current bucket in the buffer, and end within the bucket
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
    """Yield the trained tensors of a rank, in the order of its modules."""
    for number, chunk in enumerate(file.chunks):
        for name, local in chunk.items():
            if not BUFFERS.search(name):
                yield Parameter(number, name, local)


def is_expert(parameter: Parameter) -> bool:
    """Return whether a parameter is an expert's, which has its own optimizer with expert parallelism."""
    return EXPERTS in parameter.name


def owned_by(file: RankFile, chained: Sequence[Groups]) -> list[list[Parameter]]:
    """Return the parameters of each chained optimizer, given by its groups.

    Muon has the matrices except the embedding and the output layer, and a chained Adam or Lion has the rest (Megatron
    Core 0.16.1, `optimizer/muon.py`, `get_megatron_muon_optimizer`). With expert parallelism, experts have their own
    optimizer, which comes second.
    """
    every = list(parameters_of(file))
    kinds = [any(map(is_by_momentum, groups)) for groups in chained]
    of_muon = _of_muon(every, [group for groups in chained for group in groups if is_by_momentum(group)])
    owned = []
    for number, kind in enumerate(kinds):
        alike = [other for other, each in enumerate(kinds) if each == kind]
        of_kind = every if len(alike) == len(kinds) else [one for one in every if (one in of_muon) == kind]
        if len(alike) > 1:
            of_kind = [one for one in of_kind if is_expert(one) == (number != alike[0])]
        owned.append(of_kind)
    return owned


def _of_muon(every: list[Parameter], groups: Groups) -> set[Parameter]:
    """Return the parameters of Muon: what is written knows its moments, and groups that are read their number.

    Since 0.20 Muon leaves the `in_proj` of Mamba mixers to the other optimizer (`mamba_mixer.py`).
    """
    if any(one.local.moments for one in every):
        return {one for one in every if one.local.moments == BY_MOMENTUM}
    matrices = {one for one in every if is_matrix(one)}
    others = {one for one in matrices if not one.name.endswith(".mixer.in_proj.weight")}
    return others if sum(len(group.get("params", ())) for group in groups) == len(others) else matrices


def is_matrix(parameter: Parameter) -> bool:
    """Return whether a parameter is a matrix for Muon: not the embedding or the output layer."""
    return len(parameter.local.view.shape) == 2 and parameter.name not in (EMBEDDING, OUTPUT)


def dealt_to(
    groups: Sequence[Mapping[str, Any]], parameters: list[Parameter], args: Mapping[str, Any]
) -> list[list[Parameter]]:
    """Return the parameters of each group, in order.

    Groups differ in weight decay, in a separate learning rate for the embedding and the output layer, and, if one
    optimizer has experts and other parameters, in whether they are of experts.
    """
    if len(groups) == 1:
        return [parameters]
    of_experts = len({bool(group.get("is_expert_parallel")) for group in groups}) > 1
    kinds = [kind_of(parameter.name, len(parameter.local.view.shape), args) for parameter in parameters]
    return [
        [
            parameter
            for parameter, own in zip(parameters, kinds, strict=True)
            if own == kind and (not of_experts or is_expert(parameter) == bool(group.get("is_expert_parallel")))
        ]
        for group, kind in zip(groups, kinds_of(groups, args), strict=True)
    ]


def by_buffer(parameters: Iterable[Parameter]) -> dict[tuple[int, str], list[Parameter]]:
    """Return the parameters of each flat buffer, in the order of the modules: one buffer per chunk and dtype."""
    kinds: dict[tuple[int, str], list[Parameter]] = {}
    for parameter in parameters:
        kinds.setdefault((parameter.chunk, parameter.local.view.dtype), []).append(parameter)
    return kinds


def are_shared(parameter: Parameter, args: Mapping[str, Any]) -> bool:
    """Return whether a parameter is an embedding of which another pipeline stage has a copy."""
    if (args.get("pipeline_model_parallel_size") or 1) == 1:
        return False
    tied = not args.get("untie_embeddings_and_output_weights")
    copied = args.get("mtp_num_layers") and parameter.name == EMBEDDING
    return bool(copied or (tied and parameter.name in EMBEDDING_OR_OUTPUT))


def is_layer_wise(args: Mapping[str, Any]) -> bool:
    """Return whether a run distributes whole parameters over data-parallel ranks (`--optimizer dist_muon`,
    and others since 0.17).
    """
    return str(args.get("optimizer", "")).startswith("dist_") or bool(args.get("use_layer_wise_distributed_optimizer"))


def bucket_size_of(args: Mapping[str, Any]) -> int:
    """Return the minimum size of a bucket, in elements (Megatron Core, `DistributedDataParallel`)."""
    size: int = args.get("ddp_bucket_size") or max(40_000_000, 1_000_000 * (args.get("data_parallel_size") or 1))
    return size
