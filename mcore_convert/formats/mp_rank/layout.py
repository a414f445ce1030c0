"""The names of rank files for a layout, and the layout of rank files, from the run's arguments and the layers.

The name of a rank's directory is `mp_rank_TT[_PPP][_EEE]` (Megatron-LM, `get_checkpoint_name`): an index is omitted
if its size is 1, so that names alone do not distinguish expert from pipeline ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from mcore_convert.errors import LayoutError, UnreadableCheckpoint
from mcore_convert.spec.layout import Layout, Rank, Stage

RANK_NAME = re.compile(r"mp_rank_\d{2,}(_\d{3,}){0,2}")

# Arguments that are equal on all ranks of a run; others, such as `rank`, differ.
SHARED_ARGS = (
    "tensor_model_parallel_size",
    "model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "num_experts",
    "padded_vocab_size",
    "untie_embeddings_and_output_weights",
    "use_distributed_optimizer",
)


def rank_name(rank: Rank, layout: Layout) -> str:
    """Return the name of a rank's directory."""
    pipeline = f"_{rank.pp:03d}" if layout.pp > 1 else ""
    return f"mp_rank_{rank.tp:02d}{pipeline}" + (f"_{rank.ep:03d}" if layout.ep > 1 else "")


def layout_of(args: Mapping[str, Any]) -> Layout:
    """Return the layout that the arguments of a run describe.

    Raises:
        LayoutError: the layout is invalid, or shards of an expert would share a directory.
    """
    layout = Layout.of(args)
    if not args.get("num_experts"):
        return replace(layout, etp=None)
    check_expert_cut(layout)
    return replace(layout, etp=None if layout.etp == layout.tp else layout.etp)


def check_expert_cut(layout: Layout) -> None:
    """Check that each shard of an expert has a directory of its own: names have no number for it.

    Raises:
        LayoutError: etp does not divide tp.
    """
    if layout.tp % layout.expert_tp:
        raise LayoutError(
            f"experts are cut for etp = {layout.etp} and the rest for tp = {layout.tp}, "
            "which the format `torch` cannot tell apart",
            hint="save such a run as `torch_dist`",
        )


def check_names(layout: Layout, names: Iterable[str], where: str) -> None:
    """Check that there is exactly one directory per rank.

    Raises:
        UnreadableCheckpoint: some are missing, or belong to another layout.
    """
    present, wanted = set(names), {rank_name(rank, layout) for rank in layout.ranks()}
    sizes = f"tp = {layout.tp}, pp = {layout.pp}, ep = {layout.ep}"
    foreign = sorted(present - wanted)
    if foreign:
        raise UnreadableCheckpoint(
            f"{where} has {len(present)} ranks, which do not fit its arguments ({sizes}: {len(wanted)} ranks)",
            items=[
                *(f"{name} has no place" for name in foreign),
                *(f"{n} is missing" for n in sorted(wanted - present)),
            ],
        )
    if present != wanted:
        raise UnreadableCheckpoint(
            f"{where} lacks {len(wanted - present)} of the {len(wanted)} ranks that its arguments have ({sizes})",
            items=sorted(wanted - present),
            hint="the checkpoint was not copied completely, or a rank failed to save",
        )


def check_agreement(args: Mapping[str, Mapping[str, Any]], where: str) -> None:
    """Check that the arguments of all ranks, given by rank name, describe one run.

    Raises:
        UnreadableCheckpoint: with every argument that differs from that of the first rank.
    """
    first, reference = next(iter(args.items()))
    differing = [
        f"{key}: {reference.get(key)!r} on {first}, {each.get(key)!r} on {name}"
        for name, each in args.items()
        for key in SHARED_ARGS
        if repr(reference.get(key)) != repr(each.get(key))
    ]
    if differing:
        raise UnreadableCheckpoint(f"the ranks of {where} are of different runs", items=differing)


def check_order(args: Mapping[str, Mapping[str, Any]], layout: Layout, where: str) -> None:
    """Check that no rank's directory has the name of another: nothing else distinguishes the experts of two ranks.

    A run stores the number of each rank. Ranks are numbered by pipeline, expert and tensor rank, the last varying
    fastest, regardless of other dimensions (Megatron Core, `parallel_state.py`, the order `tp-cp-ep-dp-pp`).

    Raises:
        UnreadableCheckpoint: with each directory that another rank wrote.
    """
    ranks = sorted(layout.ranks(), key=lambda rank: (rank.pp, rank.ep, rank.tp))
    names = [rank_name(rank, layout) for rank in ranks]
    numbers = [number for name in names if isinstance(number := args[name].get("rank"), int)]
    if len(set(numbers)) < len(names) or any(each.get("use_tp_pp_dp_mapping") for each in args.values()):
        return
    right = dict(zip(sorted(numbers), names, strict=True))
    moved = [f"{name} is of rank {n}: {right[n]}" for n, name in zip(numbers, names, strict=True) if right[n] != name]
    if moved:
        raise UnreadableCheckpoint(
            f"ranks of {where} lie in directories of other ranks",
            items=moved,
            hint="rename them, or copy the checkpoint again: each weight would come from another place",
        )


def with_stages(layout: Layout, counts: Mapping[Stage, int], args: Mapping[str, Any], where: str) -> Layout:
    """Return the layout after checking it against the layers that each stage holds.

    A pipeline layout that was not stored as text is reconstructed from the layers.

    Raises:
        UnreadableCheckpoint: the stages' layers differ from those of the arguments.
    """
    chunks = {stage.vpp for stage in counts}
    num_layers = args.get("num_layers") or args.get("encoder_num_layers")
    total = sum(counts.values())
    if num_layers != total:
        raise UnreadableCheckpoint(f"the stages of {where} hold {total} layers, its arguments have {num_layers}")
    if layout.pipeline_layout is None and args.get("pipeline_model_parallel_layout") is not None:
        stages = ["t" * counts[stage] for stage in sorted(counts)]
        predicting = "m" * (args.get("mtp_num_layers") or 0)
        text = "|".join(["E" + stages[0], *stages[1:]]) + predicting + "L"
        layout = replace(layout, vpp=len(chunks) if len(chunks) > 1 else None, pipeline_layout=text)
    if len(chunks) != layout.num_virtual_stages:
        raise UnreadableCheckpoint(
            f"the ranks of {where} hold {len(chunks)} model chunks, its arguments have {layout.num_virtual_stages}"
        )
    demanded = {stage: len(layers) for stage, layers in layout.stages(total).items()}
    if demanded != dict(counts):
        raise UnreadableCheckpoint(
            f"the stages of {where} do not hold the layers that its arguments demand",
            items=[
                f"pipeline rank {stage.pp}, model chunk {stage.vpp}: {counts[stage]} layers, not {count}"
                for stage, count in demanded.items()
                if counts[stage] != count
            ],
        )
    return layout
