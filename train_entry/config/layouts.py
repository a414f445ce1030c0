"""Checks that a model, its batches and its layout fit each other: a line per problem.

Each problem is known from the code of Megatron Core 0.16.1, or from tests: it would end in an assertion on one rank, in
a hang of all others, or in a model that trains on and learns nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from mcore_convert.errors import LayoutError
from mcore_convert.spec import hybrid
from mcore_convert.spec.layout import Layout
from train_entry.config.schema import Config, Parallel

OF_OTHER_MODELS = (
    "multi_latent_attention",
    "mtp_num_layers",
    "moe_router_enable_expert_bias",
    "experimental_attention_variant",
    "attention_output_gate",
)
GPUS = 8  # per node, where the number must be assumed


def etp_of(parallel: Parallel) -> int:
    """Return the tensor-parallel size of experts."""
    return parallel.etp or (parallel.tp if parallel.ep == 1 else 1)


def ranks_of(parallel: Parallel) -> int:
    """Return the fewest ranks that a layout needs; a run has them, or a multiple."""
    return math.lcm(parallel.tp * parallel.pp * parallel.cp, etp_of(parallel) * parallel.ep * parallel.pp)


def layout_of(parallel: Parallel) -> Layout:
    """Return the layout as a `Layout` of the conversion."""
    return Layout(
        tp=parallel.tp,
        pp=parallel.pp,
        vpp=parallel.vpp if parallel.vpp != 1 else None,
        ep=parallel.ep,
        etp=parallel.etp,
        first_stage_layers=parallel.first_stage_layers,
        last_stage_layers=parallel.last_stage_layers,
    )


def torchrun(ranks: int) -> str:
    """Return the command that starts this number of ranks."""
    if ranks <= GPUS or ranks % GPUS:
        return f"torchrun --nproc-per-node {ranks} -m train_entry CONFIG"
    return f"torchrun --nnodes {ranks // GPUS} --nproc-per-node {GPUS} -m train_entry CONFIG"


def problems_of_ranks(config: Config, world_size: int) -> Iterator[str]:
    """Yield the problems of the number of ranks, and of splitting a global batch over them."""
    parallel, training = config.parallel, config.training
    unit = ranks_of(parallel)
    if world_size % unit:
        sizes = ("tp", "pp", "cp") if parallel.ep == 1 else ("tp", "pp", "cp", "ep")
        product = " x ".join(f"{name} {getattr(parallel, name)}" for name in sizes)
        there = "is 1" if world_size == 1 else f"are {world_size}"
        ranks = max(world_size // unit, 1) * unit
        yield (
            f"{product} needs a multiple of {unit} ranks, and there {there}: start it with `{torchrun(ranks)}`, or "
            "choose another layout"
        )
        return
    dp = world_size // (parallel.tp * parallel.pp * parallel.cp)
    batch, micro = training.global_batch_size, training.micro_batch_size
    if batch % (micro * dp):
        below = batch // (micro * dp) * micro * dp
        fitting = " and ".join(str(each) for each in (below, below + micro * dp) if each)
        yield (
            f"`training.global_batch_size` = {batch} is no multiple of {micro * dp}: `training.micro_batch_size` = "
            f"{micro} on each of {dp} data-parallel ranks; the next that fit: {fitting}"
        )
        return
    microbatches = batch // (micro * dp)
    if (parallel.vpp or 1) > 1 and parallel.pp > 1 and microbatches % parallel.pp:
        yield (
            f"virtual stages (`parallel.vpp`) need a multiple of pp = {parallel.pp} microbatches in a step, and there "
            f"are {microbatches}: change `training.global_batch_size` or `training.micro_batch_size`"
        )


def problems_of_layout(config: Config) -> Iterator[str]:
    """Yield the contradictions between sizes, whatever the model."""
    parallel, length = config.parallel, config.training.seq_length
    if (parallel.vpp or 1) > 1 and parallel.pp == 1:
        yield f"`parallel.vpp` = {parallel.vpp} cuts pipeline stages, and there is one: it needs `parallel.pp` > 1"
    for name in ("first_stage_layers", "last_stage_layers"):
        layers = getattr(parallel, name)
        if layers is not None and parallel.pp == 1:
            yield f"`parallel.{name}` = {layers} says nothing without pipeline stages: it needs `parallel.pp` > 1"
        elif layers == 0:
            yield f"`parallel.{name}` = 0: Megatron Core gives each pipeline rank a layer at least"
    if parallel.sequence_parallel and parallel.tp == 1:
        yield "`parallel.sequence_parallel` splits over tensor-parallel ranks: it needs `parallel.tp` > 1"
    if parallel.cp > 1 and length % (2 * parallel.cp):
        yield (
            f"`training.seq_length` = {length} is no multiple of 2 x cp = {2 * parallel.cp}: each rank has an early "
            "and a late chunk of it"
        )
    elif parallel.sequence_parallel and (length // parallel.cp) % parallel.tp:
        over = f"tp = {parallel.tp}" if parallel.cp == 1 else f"tp x cp = {parallel.tp * parallel.cp}"
        yield f"`training.seq_length` = {length} cannot be split over {over}, as sequence parallelism does"
    if parallel.overlap_param_gather and not parallel.distributed_optimizer:
        yield "`parallel.overlap_param_gather` gathers what `parallel.distributed_optimizer` has split: it needs that"
    if parallel.overlap_param_gather and not parallel.overlap_grad_reduce:
        yield "`parallel.overlap_param_gather` needs `parallel.overlap_grad_reduce`, whose buckets it shares"
    if parallel.distributed_optimizer and config.optimizer.name == "sgd":
        yield "`parallel.distributed_optimizer` splits AdamW's state alone: it does not go with `optimizer.name` = sgd"


def problems_of_model(config: Config, args: Mapping[str, Any]) -> Iterator[str]:
    """Yield the problems of a model's sizes, and of cutting them at this layout.

    Args:
        args: arguments of the model under Megatron-LM's names. Those that are missing or None are not checked.
    """
    parallel, length = config.parallel, config.training.seq_length
    if hybrid.is_hybrid(args):
        args = {**args, hybrid.PATTERN: hybrid.stated_pattern(args)}
    for name in (hybrid.PATTERN, *OF_OTHER_MODELS):
        if args.get(name):
            yield f"`{name}` = {args[name]}: such a model is converted and resharded, and not trained here"
    hidden, heads, groups = args.get("hidden_size"), args.get("num_attention_heads"), args.get("num_query_groups")
    if hidden and heads and hidden % heads and not args.get("kv_channels"):
        yield f"`hidden_size` = {hidden} is no multiple of `num_attention_heads` = {heads}: give `kv_channels`"
    if heads and groups and heads % groups:
        yield f"`num_attention_heads` = {heads} cannot share `num_query_groups` = {groups}: no multiple of it"
    if heads and heads % parallel.tp:
        yield f"`num_attention_heads` = {heads} cannot be split over tp = {parallel.tp}"
    if groups and groups % parallel.tp and parallel.tp % groups:
        yield f"`num_query_groups` = {groups} can neither be split over tp = {parallel.tp} nor be shared by it"
    ffn = args.get("ffn_hidden_size")
    if ffn and ffn % parallel.tp:
        yield f"`ffn_hidden_size` = {ffn} cannot be split over tp = {parallel.tp}"
    positions = args.get("max_position_embeddings")
    if positions and length > positions:
        yield (
            f"`training.seq_length` = {length} is longer than the model, `max_position_embeddings` = {positions}: "
            "position embeddings end there"
        )
    if args.get("num_layers"):
        yield from _problems_of_stages(config, args["num_layers"])
    yield from _problems_of_experts(parallel, args)


def _problems_of_stages(config: Config, num_layers: int) -> Iterator[str]:
    parallel, training = config.parallel, config.training
    try:
        stages = layout_of(parallel).stages(num_layers)
    except LayoutError as error:
        sizes = f"pp = {parallel.pp}" + (f", vpp = {parallel.vpp}" if parallel.vpp else "")
        uneven = (
            ""
            if parallel.first_stage_layers or parallel.last_stage_layers
            else ("; `parallel.first_stage_layers` and `parallel.last_stage_layers` make uneven stages")
        )
        yield f"{num_layers} layers do not fit {sizes}: {error.message}{uneven}"
        return
    at_once = training.recompute_num_layers
    for count in sorted({len(layers) for layers in stages.values()}):
        if count == 0:
            yield f"{num_layers} layers are too few for {len(stages)} stages: one is left without a layer"
        elif training.recompute == "full" and count % at_once:
            yield (
                f"`training.recompute_num_layers` = {at_once} does not divide the {count} layers of a stage: Megatron "
                "Core recomputes whole blocks and would look for layers that are not there"
            )


def _problems_of_experts(parallel: Parallel, args: Mapping[str, Any]) -> Iterator[str]:
    experts, etp = args.get("num_experts"), etp_of(parallel)
    if not experts:
        if "num_experts" in args:
            for name in ("ep", "etp"):
                if (getattr(parallel, name) or 1) > 1:
                    yield f"`parallel.{name}` = {getattr(parallel, name)} splits experts, and the model has none"
        return
    if experts % parallel.ep:
        yield f"`num_experts` = {experts} cannot be split over ep = {parallel.ep}"
    wide = args.get("moe_ffn_hidden_size") or args.get("ffn_hidden_size")
    if wide and wide % etp:
        yield f"`moe_ffn_hidden_size` = {wide} cannot be split over etp = {etp}"
    if parallel.tp > 1 and not parallel.sequence_parallel:
        yield "Megatron Core trains experts under tensor parallelism only with `parallel.sequence_parallel`: set it"
    if args.get("add_bias_linear") and etp > 1:
        yield f"experts with biases (`add_bias_linear`) cannot be split over etp = {etp}: set `parallel.etp` to 1"
    topk, balancing = args.get("moe_router_topk") or 2, args.get("moe_router_load_balancing_type")
    if topk > experts:
        yield f"`moe_router_topk` = {topk} is more than there are experts, `num_experts` = {experts}"
    if topk == 1 and not args.get("moe_router_pre_softmax") and balancing != "sinkhorn":
        yield "`moe_router_topk` = 1 without `moe_router_pre_softmax`: the softmax of one number has no gradient"
    if balancing == "sinkhorn" and args.get("moe_aux_loss_coeff"):
        yield "sinkhorn balances experts without a loss: set `model.moe_aux_loss_coeff` to 0"
