"""Arguments of a Megatron target that follow from its content: modules, optimizer and layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcore_convert.errors import LayoutError
from mcore_convert.formats.base import Training
from mcore_convert.formats.megatron import modules
from mcore_convert.formats.traits import LayerSpec
from mcore_convert.spec import hybrid, releases
from mcore_convert.spec.config.latent import has_original_positions
from mcore_convert.spec.dims import Dims
from mcore_convert.spec.layers import EXPERTS
from mcore_convert.spec.layout import Layout
from mcore_convert.spec.releases import EXPERTS_IN_HYBRIDS, MIXER_HEADS, PATTERN_WITH_STAGES, Release, spelled


def implementation_of(args: Mapping[str, Any]) -> str:
    """Return the layer spec that a run with these arguments builds; Transformer Engine's unless they say otherwise."""
    return modules.LOCAL if args.get("transformer_impl") == modules.LOCAL else modules.TRANSFORMER_ENGINE


def experts_of(args: Mapping[str, Any]) -> str:
    """Return the form in which such a run keeps its experts."""
    grouped = args.get("moe_grouped_gemm") and implementation_of(args) == modules.TRANSFORMER_ENGINE
    return modules.GROUPED if grouped else modules.SEQUENTIAL


def modules_of(source: LayerSpec | None, args: Mapping[str, Any], implementation: str | None) -> dict[str, Any]:
    """Return the arguments that choose the modules, so that their parameters have the names in the files.

    Megatron's own spec keeps experts one by one: up to 0.16 `--moe-grouped-gemm` without Transformer Engine was another
    module, `GroupedMLP`, whose form is not written here.
    """
    chosen_by = source.implementation if source else implementation_of(args)
    implementation = implementation or chosen_by
    grouped = bool(args.get("moe_grouped_gemm")) if source is None else source.experts == modules.GROUPED
    chosen: dict[str, Any] = {"transformer_impl": implementation}
    if args.get("num_experts"):
        chosen["moe_grouped_gemm"] = grouped and implementation == modules.TRANSFORMER_ENGINE
    return chosen


def optimizer_arguments(training: Training) -> dict[str, Any]:
    """Return the arguments by which Megatron-LM locates the optimizer's state, taken from the state itself.

    A checkpoint whose arguments record that no optimizer was saved is loaded without one (`load_checkpoint`).
    """
    fields: dict[str, Any] = {"use_distributed_optimizer": training.distributed, "no_save_optim": None}
    scheduler = training.scheduler or {}
    for group in training.groups:
        prefix = "decoupled_" if group.get("is_decoupled_lr") else ""
        for name, stored in ((f"{prefix}lr", "max_lr"), (f"{prefix}min_lr", "min_lr")):
            value = group.get(stored, None if prefix else scheduler.get(stored))
            if value is not None and name not in fields:
                fields[name] = value
    return fields


def layout_arguments(layout: Layout, dims: Dims) -> dict[str, Any]:
    """Return the Megatron arguments that a layout decides.

    The number of layers per virtual stage is given where all stages are equal; else Megatron-LM gets the number of
    virtual stages. A pipeline layout implies it.
    """
    vpp = layout.num_virtual_stages if layout.num_virtual_stages > 1 else None
    stages = vpp if layout.pipeline_layout is None else None
    per_stage = dims.num_layers // layout.pp // stages if stages and layout.is_even else None
    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": vpp,
        "num_layers_per_virtual_pipeline_stage": per_stage,
        "num_virtual_stages_per_pipeline_rank": None if per_stage else stages,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.expert_tp,
        "decoder_first_pipeline_num_layers": layout.first_stage_layers,
        "decoder_last_pipeline_num_layers": layout.last_stage_layers,
        "account_for_embedding_in_pipeline_split": layout.account_for_embedding,
        "account_for_loss_in_pipeline_split": layout.account_for_loss,
        "pipeline_model_parallel_layout": layout.pipeline_layout,
        "padded_vocab_size": dims.padded_vocab_size,
        "world_size": layout.ranks_per_stage * layout.pp,
    }


# Arguments that cut a `GPTModel` into stages. In a hybrid the stage borders within the pattern do so instead.
NO_STAGES: dict[str, Any] = {
    "num_layers_per_virtual_pipeline_stage": None,
    "num_virtual_stages_per_pipeline_rank": None,
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
    "pipeline_model_parallel_layout": None,
}


def pattern_arguments(layout: Layout, dims: Dims, release: Release) -> dict[str, Any]:
    """Return the arguments for the layers of a hybrid and for its stages of unequal size; none for other models.

    Both names of the pattern are stored where any release may load it; each release reads its own name
    (`load_args_from_checkpoint`).

    Raises:
        LayoutError: the release does not support such stages, or such layers.
    """
    if dims.pattern is None:
        return {}
    if dims.layers_with(EXPERTS) and release < EXPERTS_IN_HYBRIDS:
        raise LayoutError(f"experts in a hybrid need Megatron-LM {spelled(EXPERTS_IN_HYBRIDS)} or later")
    inner, usual = dims.size("mamba_inner"), hybrid.EXPANSION * dims.hidden_size
    if inner not in (0, usual) and release < MIXER_HEADS:
        raise LayoutError(
            f"Mamba layers that are {inner} wide, and not {usual}, need Megatron-LM {spelled(MIXER_HEADS)} or later"
        )
    since = spelled(PATTERN_WITH_STAGES)
    fixed = {"is_hybrid_model": True, **dict.fromkeys(hybrid.RATIOS, 0.0)}  # 0.17 refuses ratios beside a pattern
    only_ends = layout.pipeline_layout is None and not (layout.account_for_embedding or layout.account_for_loss)
    if layout.num_virtual_stages == 1 and only_ends:
        newer = {} if release < PATTERN_WITH_STAGES else {hybrid.PATTERN: dims.pattern}
        return {**fixed, hybrid.PATTERN: None, hybrid.OLD_PATTERN: dims.pattern, **newer}
    if release < PATTERN_WITH_STAGES:
        raise LayoutError(
            f"the stages of a hybrid are even, but for the first and the last, before Megatron-LM {since}"
        )
    pattern = hybrid.with_stages(dims.pattern, map(len, layout.stages(dims.num_layers).values()))
    return {**fixed, **NO_STAGES, hybrid.PATTERN: pattern, hybrid.OLD_PATTERN: None}


def refuse_young(args: Mapping[str, Any], dims: Dims, layout: Layout, release: Release) -> None:
    """Refuse features that the release to write for does not have yet."""
    young = {
        "a pipeline layout": (layout.pipeline_layout is not None, releases.PIPELINE_LAYOUT),
        "attention with sinks": (args.get("softmax_type") == "learnable", releases.SINKS),
        "a router with a bias": (dims.expert_bias, releases.SINKS),
        "YaRN with original positions of its own": (has_original_positions(args), releases.ORIGINAL_POSITIONS),
    }
    for what, (is_there, since) in young.items():
        if is_there and release < since:
            raise LayoutError(f"{what} needs Megatron-LM {spelled(since)} or later, not {spelled(release)}")
