"""The data of a page that draws layouts: cuts of each weight, layers of each stage, and the choices.

The choices are independent: tensor parallelism decides the boxes of a weight, expert tensor parallelism those of an
expert's weight, the pipeline the layers of a stage, and expert parallelism the experts. So the page stores each once
and combines them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from mcore_convert.checkpoints.contents import family_of
from mcore_convert.checkpoints.identify import Model
from mcore_convert.errors import ConvertError, LayoutError
from mcore_convert.formats.base import Findings, Side
from mcore_convert.inspection.describe import dims_at, dtype_of, saved_layout
from mcore_convert.spec.dims import Dims
from mcore_convert.spec.family import Item, Weight
from mcore_convert.spec.gpt import EMBEDDING
from mcore_convert.spec.holding import is_of_expert
from mcore_convert.spec.layout import Layout
from mcore_convert.spec.names import OPTIMIZER_STATES, Index, placeholders_of
from mcore_convert.storage.views import DTYPE_SIZES

TP_CHOICES = (1, 2, 4, 8, 16, 32)
PP_CHOICES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
VPP_CHOICES = (None, 2, 4)
MOST_PIPELINES = 24
MOST_BANDS = 600
AS_TP = 0  # the expert-tensor-parallel size that follows `tp`

Data = dict[str, Any]


def layout_data(model: Model, planned: Layout | None) -> Data | None:
    """Return all data about layouts of a model; None if its weights, or the layout of the run, are unknown.

    Args:
        planned: a requested layout; else one that differs from that of the checkpoint is proposed.
    """
    try:
        weights = [w for w in family_of(model).weights if w.mcore is not None and w.exists(model.dims)]
    except ConvertError:
        return None
    saved = saved_layout(model)
    if saved is None and model.checkpoint.side is Side.MEGATRON:
        return None
    start = (saved or Layout()).of_model(model.dims)
    try:
        start.check(model.dims)
        saved_cut = _cut(weights, model.dims, start.tp)
    except LayoutError:
        return None
    proposed = (planned or _proposed(model.dims, start)).of_model(model.dims)
    fitting = (tp for tp in TP_CHOICES if _fits(model.dims, Layout(tp=tp).of_model(model.dims)))
    tps = sorted({proposed.tp, *fitting})
    etps = _expert_tps(model.dims, start, proposed)
    pipelines = _pipelines(model.dims, start, proposed)
    optimizer, is_known = _optimizer_bytes(model)
    return {
        "tied": model.dims.tied,
        "itemsize": DTYPE_SIZES[dtype_of(model)],
        "dtype": dtype_of(model),
        "optimizerBytes": optimizer,
        "optimizerKnown": is_known,
        "weights": [_weight(weight, model) for weight in weights],
        "cuts": [saved_cut, *(_cut(weights, dims_at(model, tp), tp) for tp in tps)],
        "expertCuts": _expert_cuts(weights, model.dims, {start.expert_tp, proposed.expert_tp, *tps, *etps} - {AS_TP}),
        "expertTps": etps,
        "pipelines": [_pipeline(layout, model.dims.num_layers) for layout in pipelines],
        "experts": _expert_choices(model.dims, start, proposed),
        "saved": {
            "cut": 0,
            "pipeline": pipelines.index(_pipe(start)),
            "ep": start.ep,
            "etp": start.etp or AS_TP,
            "isStored": saved is None,
        },
        "planned": {
            "cut": 1 + tps.index(proposed.tp),
            "pipeline": pipelines.index(_pipe(proposed)),
            "ep": proposed.ep,
            "etp": proposed.etp or AS_TP,
            "isAsked": planned is not None,
        },
    }


def _weight(weight: Weight, model: Model) -> Data:
    """Return a row of the family: its place, its cuts, and the Hugging Face tensors that lie in it."""
    name = weight.name
    held = placeholders_of(name)
    row = next((each for each in model.family.weights if each.mcore == name), weight)
    end = "embedding" if name.startswith("embedding.") else "output"
    return {
        "name": name,
        "place": "layer" if "layer" in held else end,
        "times": model.dims.mtp_num_layers if weight.predicts else 1,  # number of layers at the end
        "expert": is_of_expert(weight),
        "layers": model.dims.layers_with(weight.part) if "layer" in held else [],
        "dim": weight.shard.dim,
        "parts": len(weight.shard.parts),
        "shape": model.dims.shape(weight.shape),
        "vocab": weight.vocab,
        "copied": (weight.vocab and model.dims.tied) or (name == EMBEDDING and model.dims.mtp_num_layers > 0),
        "trained": weight.trained,
        "hf": row.hf,
        "bands": _bands(row, model.dims),
    }


def _bands(row: Weight, dims: Dims) -> list[tuple[int, int, int]]:
    """Return the rows of the global tensor by Hugging Face tensor: the tensor's number, the first row, the count."""
    if len(row.hf) < 2:
        return []
    pieces = row.pack.pieces(dims.shape(row.shape), dims)
    bands = sorted((piece.mcore.offsets[0], piece.tensor, piece.mcore.sizes[0]) for piece in pieces)
    return [(tensor, first, count) for first, tensor, count in bands] if len(bands) <= MOST_BANDS else []


def _cut(weights: Iterable[Weight], dims: Dims, tp: int) -> Data:
    """Return the boxes of every weight on each tensor-parallel rank, as offsets and sizes; experts are left out."""
    return {"tp": tp, "weights": [None if is_of_expert(weight) else _boxes(weight, dims, tp) for weight in weights]}


def _expert_cuts(weights: Iterable[Weight], dims: Dims, etps: Iterable[int]) -> Data:
    """Return the boxes of every weight of an expert, for each number of ranks that may share one."""
    numbers = [(number, weight) for number, weight in enumerate(weights) if is_of_expert(weight)]
    fitting = [etp for etp in sorted(etps) if not dims.num_experts or dims.size("moe_ffn") % etp == 0]
    return {str(etp): {str(number): _boxes(weight, dims, etp) for number, weight in numbers} for etp in fitting}


def _boxes(weight: Weight, dims: Dims, tp: int) -> Data:
    shape = dims.padded_shape(weight.shape, vocab=weight.vocab)
    shard = dims.sized(weight.shard)
    return {"shape": shape, "boxes": [shard.boxes(shape, tp, rank) for rank in range(tp)]}


def _pipe(layout: Layout) -> Layout:
    """Return the pipeline of a layout alone, normalised."""
    chunks = layout.num_virtual_stages
    return replace(layout, tp=1, ep=1, etp=None, vpp=chunks if chunks > 1 else None)


def _pipeline(layout: Layout, num_layers: int) -> Data:
    stages = layout.stages(num_layers)
    counts = [len(layers) for layers in stages.values()]
    words = f"{layout.pp} stage{'s' * (layout.pp > 1)}"
    if layout.num_virtual_stages > 1:
        words += f", {layout.num_virtual_stages} chunks each"
    if len(set(counts)) > 1:
        words += f" ({'/'.join(map(str, counts))} layers)"
    return {
        "pp": layout.pp,
        "vpp": layout.num_virtual_stages,
        "label": words,
        "stages": [[stage.pp, stage.vpp, layers.start, layers.stop] for stage, layers in stages.items()],
    }


def _pipelines(dims: Dims, *wanted: Layout) -> list[Layout]:
    """Return the pipelines to choose from, with the wanted ones, from few ranks to many."""
    regular = (Layout(pp=pp, vpp=vpp) for pp in PP_CHOICES for vpp in VPP_CHOICES if pp > 1 or vpp is None)
    fitting = [layout for layout in regular if _fits(dims, layout)][:MOST_PIPELINES]
    layouts = list(dict.fromkeys([*fitting, *map(_pipe, wanted)]))
    return sorted(layouts, key=lambda layout: (layout.pp, layout.num_virtual_stages))


def _expert_choices(dims: Dims, *wanted: Layout) -> Data:
    """Return the experts of each rank, for every expert-parallel size; that of a model without experts is 1."""
    if not dims.num_experts:
        return {"1": [None]}
    sizes = {layout.ep for layout in wanted} | {ep for ep in TP_CHOICES if dims.num_experts % ep == 0}
    choices = {}
    for ep in sorted(sizes):
        ranges = [Layout(ep=ep).experts(dims.num_experts, rank) for rank in range(ep)]
        choices[str(ep)] = [[experts.start, experts.stop] for experts in ranges]
    return choices


def _expert_tps(dims: Dims, *wanted: Layout) -> list[int]:
    """Return the numbers of ranks an expert may be cut over: as the other weights, one, and the wanted ones."""
    if not dims.num_experts:
        return [AS_TP]
    return [1] if dims.expert_bias else sorted({AS_TP, 1, *(layout.etp or AS_TP for layout in wanted)})


def _fits(dims: Dims, layout: Layout) -> bool:
    try:
        layout.check(dims)
    except LayoutError:
        return False
    return True


def _proposed(dims: Dims, start: Layout) -> Layout:
    """Return another layout, as an initial proposal."""
    ranks = start.tp * start.pp
    tps = [tp for tp in (8, 4, 2, 1) if ranks % tp == 0]
    as_many = [Layout(tp=tp, pp=ranks // tp, ep=start.ep) for tp in tps]  # the widest TP within a node first
    for layout in [*as_many, Layout(tp=2, pp=2, ep=start.ep), Layout(tp=2, ep=start.ep), Layout(pp=2, ep=start.ep)]:
        is_other = (layout.tp, layout.pp) != (start.tp, start.pp)
        if is_other and _fits(dims, layout.of_model(dims)):
            return layout
    return start


def _optimizer_bytes(model: Model) -> tuple[int, bool]:
    """Return the bytes of optimizer state per trained element, and whether the checkpoint has optimizer state.

    Without it, Adam's moments in fp32 are assumed, and a master copy where the weights are not fp32.
    """
    checkpoint = model.checkpoint
    states = [state for state in checkpoint.states if state in OPTIMIZER_STATES]
    if not states:
        return (8 if dtype_of(model) == "float32" else 12), False
    first = next(weight for weight in family_of(model).weights if weight.trained and weight.mcore is not None)
    at = Index(0 if first.per_layer else None)
    slots = [checkpoint.locate(Item(first, at, state), model.dims, Findings()) for state in states]
    return sum(slots_of_state[0].view.itemsize for slots_of_state in slots if slots_of_state), True
