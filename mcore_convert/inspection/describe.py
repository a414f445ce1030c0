"""The description of a directory: format, family, sizes, layout, weights, optimizer state. Reads headers only."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from mcore_convert.checkpoints.contents import family_of
from mcore_convert.checkpoints.identify import Model, Opened
from mcore_convert.errors import ConfigError, LayoutError
from mcore_convert.formats.base import Side
from mcore_convert.inspection.outliers import Outlier
from mcore_convert.inspection.ranks import RankPart, rank_parts
from mcore_convert.inspection.statistics import WeightStatistics
from mcore_convert.spec import gpt
from mcore_convert.spec.config import arguments
from mcore_convert.spec.dims import Dims
from mcore_convert.spec.layout import Layout
from mcore_convert.storage.codecs import Quantised
from mcore_convert.storage.views import TensorMeta

RANK = re.compile(r"mp_rank_[\d_]+( model\d+)?: ")  # prefix of a rank; tensors of all ranks are counted together
INDEX = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True)
class WeightLine:
    """Line of the table of weights: `count` tensors whose names differ in an index only."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    count: int
    nbytes: int


@dataclass(frozen=True)
class Inspection:
    """Content of a directory. `refusals` are the reasons why no family represents it.

    `ranks` are those of the layout that it was saved at, `planned` those of a requested layout. `statistics` are
    present if requested, with the `outliers` in them. `quantised` is set where weights are
    decoded on reading; `nbytes` and `dtypes` are then those of the files, and `weights` the decoded ones.
    """

    path: str
    format: str
    written_by: str | None
    iteration: int | None
    family: str | None
    refusals: tuple[str, ...]
    layout: Mapping[str, Any] | None
    dialect: str | None
    dtypes: tuple[str, ...]
    num_parameters: int
    nbytes: int
    num_files: int
    tied: bool | None
    vocab_size: int | None
    padded_vocab_size: int | None
    architecture: Mapping[str, Any]
    optimizer: str | None
    optimizer_keys: int
    weights: tuple[WeightLine, ...]
    notes: tuple[str, ...]
    ranks: tuple[RankPart, ...] = ()
    planned: tuple[RankPart, ...] = ()
    statistics: tuple[WeightStatistics, ...] = ()
    outliers: tuple[Outlier, ...] = ()
    quantised: Quantised | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        own = {name: getattr(self, name) for name in ("ranks", "planned", "statistics")}  # have their own `as_dict`
        plain = asdict(replace(self, ranks=(), planned=(), statistics=()))
        return plain | {name: [each.as_dict() for each in parts] for name, parts in own.items()}


def inspection_of(opened: Opened) -> Inspection:
    """Describe an open checkpoint by its headers. Completeness is not proven here: `verify` and `convert` do that."""
    checkpoint, model, refusals = opened.checkpoint, opened.model, opened.refusals
    tensors, stored = checkpoint.tensors, checkpoint.headers.values()
    dims = model.dims if model else None
    storage = checkpoint.storage()
    return Inspection(
        path=str(checkpoint.path),
        format=checkpoint.format,
        written_by=storage.written_by,
        iteration=checkpoint.common.iteration,
        family=model.family.name if model and not refusals else None,
        refusals=refusals,
        layout=_layout_sizes(checkpoint.common.args or {}),
        dialect=storage.dialect,
        dtypes=tuple(sorted({meta.dtype for meta in stored})),
        num_parameters=model.num_parameters if model else sum(meta.numel for meta in tensors.values()),
        nbytes=sum(meta.nbytes for meta in stored),
        num_files=storage.num_files,
        tied=dims.tied if dims else None,
        vocab_size=dims.vocab_size if dims else None,
        padded_vocab_size=dims.padded_vocab_size if dims else None,
        architecture=dict(model.family.config.to_hf(model.args)) if model and not refusals else {},
        optimizer=storage.optimizer,
        optimizer_keys=len(checkpoint.optimizer_keys),
        weights=_lines(tensors),
        notes=_notes(model) if model else (),
        ranks=_ranks(model) if model else (),
        quantised=checkpoint.quantised,
    )


def _notes(model: Model) -> tuple[str, ...]:
    note = model.choice.note if model.choice else None
    return model.notes if note is None else (*model.notes, note)


def _ranks(model: Model) -> tuple[RankPart, ...]:
    """Return the part of each rank of the run; empty where the arguments do not determine it."""
    layout = saved_layout(model)
    if layout is None:
        return ()
    try:
        return tuple(rank_parts(gpt.family(model.args), model.dims, layout, dtype_of(model)))
    except (LayoutError, ConfigError):
        return ()


def saved_layout(model: Model) -> Layout | None:
    """Return the layout at which a checkpoint was saved; None if it has none, or does not record it."""
    checkpoint = model.checkpoint
    if checkpoint.side is Side.HUGGING_FACE:
        return None
    try:
        layout = checkpoint.saved_layout or Layout.of(model.args)
    except LayoutError:
        return None
    experts_apart = model.dims.num_experts and layout.etp != layout.tp
    return layout if experts_apart else replace(layout, etp=None)


def planned_ranks(opened: Opened, layout: Layout) -> tuple[RankPart, ...]:
    """Return the part of each rank at another layout, with the vocabulary padded as Megatron-LM pads it there.

    Raises:
        LayoutError: the model does not fit the layout.
        ConfigError: the model is unknown.
    """
    model = opened.model
    if model is None:
        raise opened.error or ConfigError("a layout needs a model that is known")
    return tuple(rank_parts(family_of(model), dims_at(model, layout.tp), layout, dtype_of(model)))


def dims_at(model: Model, tp: int) -> Dims:
    """Return the sizes of a model, its vocabulary padded for a tensor-parallel size."""
    divisible_by = model.args.get("make_vocab_size_divisible_by") or 128
    padded = arguments.padded_vocab_size(model.dims.vocab_size, tp, divisible_by)
    return replace(model.dims, padded_vocab_size=padded)


def dtype_of(model: Model) -> str:
    """Return the dtype of the first weight."""
    return next(iter(model.checkpoint.tensors.values())).dtype


def _layout_sizes(args: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the sizes of the layout in stored arguments; None if they have none."""
    tp, etp = args.get("tensor_model_parallel_size"), args.get("expert_tensor_parallel_size")
    sizes = {
        "tp": tp,
        "pp": args.get("pipeline_model_parallel_size"),
        "vpp": args.get("virtual_pipeline_model_parallel_size"),
        "ep": args.get("expert_model_parallel_size"),
        "etp": etp if args.get("num_experts") and etp != tp else None,
        "cp": args.get("context_parallel_size"),
        "world_size": args.get("world_size"),
    }
    return {name: size for name, size in sizes.items() if size is not None} or None


def _lines(tensors: Mapping[str, TensorMeta]) -> tuple[WeightLine, ...]:
    """Return the tensors with layer and expert indices folded, in the order in which they are stored."""
    groups: dict[tuple[str, TensorMeta], list[list[int]]] = {}
    for key, meta in tensors.items():
        name = RANK.sub("", key)
        indices = [int(number) for number in INDEX.findall(name)]
        groups.setdefault((INDEX.sub("{}", name), meta), []).append(indices)
    return tuple(
        WeightLine(_folded(template, members), meta.shape, meta.dtype, len(members), len(members) * meta.nbytes)
        for (template, meta), members in groups.items()
    )


def _folded(template: str, members: list[list[int]]) -> str:
    spans = [_span(values) for values in zip(*members, strict=True)]
    return template.format(*spans)


def _span(values: Iterable[int]) -> str:
    ordered = sorted(set(values))
    if len(ordered) == 1:
        return str(ordered[0])
    whole = ordered == list(range(ordered[0], ordered[-1] + 1))
    return f"{{{ordered[0]}...{ordered[-1]}}}" if whole else f"{{{','.join(map(str, ordered))}}}"
