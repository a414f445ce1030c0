"""Requirements of a run, before it starts: parameters, the split of a batch, and bytes of memory on a rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mcore_convert.inspection.ranks import rank_parts
from mcore_convert.spec import gpt
from mcore_convert.spec.dims import Dims
from mcore_convert.spec.shard import Box
from train_entry.config.layouts import layout_of
from train_entry.config.schema import Config

FULL = 4  # bytes of fp32, the dtype of gradients, master weights and the optimizer's state
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class Estimate:
    """Estimate for a run. Bytes are those of the rank that has most of each.

    `activations` counts the tensors that a forward pass keeps for the backward pass, for all microbatches in flight,
    and the logits; further memory of kernels and the allocator is not included.
    """

    num_parameters: int
    num_local_parameters: int
    world_size: int
    dp: int
    num_microbatches: int
    tokens_per_step: int
    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def memory(self) -> int:
        """Total bytes."""
        return self.weights + self.gradients + self.optimizer + self.activations


def estimate(config: Config, args: Mapping[str, Any], world_size: int) -> Estimate:
    """Return the requirements of a run on this number of ranks.

    Args:
        args: normalised Megatron-LM arguments of the model, with both sizes of its vocabulary.

    Raises:
        LayoutError: the model does not fit the layout.
    """
    parallel, training = config.parallel, config.training
    dims = Dims.of(args, vocab_size=args["vocab_size"], padded_vocab_size=args["padded_vocab_size"])
    family = gpt.family(args)
    whole = sum(Box.whole(family.shape(weight, dims)).numel for weight, _ in family.instances(dims))
    parts = rank_parts(family, dims, layout_of(parallel), DTYPES[training.precision])
    most = max(parts, key=lambda part: part.num_parameters)
    dp = world_size // (parallel.tp * parallel.pp * parallel.cp)
    microbatches = training.global_batch_size // (training.micro_batch_size * dp)
    # sharded state is split over data- and context-parallel ranks together; that of experts over fewer
    over = max(dp * parallel.cp // parallel.ep, 1) if parallel.distributed_optimizer else 1
    copies = (2 if config.optimizer.name == "adamw" else 1) + (training.precision != "fp32")
    return Estimate(
        num_parameters=whole,
        num_local_parameters=most.num_parameters,
        world_size=world_size,
        dp=dp,
        num_microbatches=microbatches,
        tokens_per_step=training.global_batch_size * training.seq_length,
        weights=most.nbytes,
        gradients=most.num_parameters * FULL,
        optimizer=most.num_parameters * FULL * copies // over,
        activations=_activations(config, args, dims, microbatches),
    )


def _activations(config: Config, args: Mapping[str, Any], dims: Dims, microbatches: int) -> int:
    """Return the bytes on the first pipeline rank, with most microbatches in flight, or the last, with the logits."""
    parallel, training = config.parallel, config.training
    size = FULL if training.precision == "fp32" else FULL // 2
    tokens = training.micro_batch_size * training.seq_length // parallel.cp
    layers = max(map(len, layout_of(parallel).stages(dims.num_layers).values()))
    kept = _kept(config, args, dims)
    if training.recompute == "full":
        of_stage, transient = -(-layers // training.recompute_num_layers) * dims.hidden_size, kept
        transient *= training.recompute_num_layers
    else:
        of_stage, transient = layers * kept, 0

    def on(rank: int) -> int:
        under_way = min(_under_way(config, rank), microbatches * (parallel.vpp or 1))
        return tokens * size * (under_way * of_stage + transient)

    logits = tokens * dims.padded_vocab_size // parallel.tp * (size + FULL)
    return max(on(0), on(parallel.pp - 1) + logits)


def _under_way(config: Config, rank: int) -> int:
    """Return the most stages of microbatches that a pipeline rank has in flight, between forward and backward pass.

    Follows the warm-up of Megatron Core 0.16.1's schedules (`pipeline_parallel/schedules.py`).
    """
    pp, vpp = config.parallel.pp, config.parallel.vpp or 1
    if pp == 1:
        return 1
    later = pp - rank - 1
    return later + 1 if vpp == 1 else 2 * later + (vpp - 1) * pp + 1


def _kept(config: Config, args: Mapping[str, Any], dims: Dims) -> int:
    """Return the elements that a layer keeps per token on a rank: the inputs of its norms, matrices and activation."""
    parallel, training = config.parallel, config.training
    heads, keys = dims.num_attention_heads * dims.kv_channels, dims.num_query_groups * dims.kv_channels
    ffn = dims.ffn_hidden_size
    if dims.moe_ffn_hidden_size:
        ffn = dims.moe_ffn_hidden_size * (args.get("moe_router_topk") or 2)
    # two norms, and their outputs to the first matrix of attention and of the MLP
    whole = 4 * dims.hidden_size // (parallel.tp if parallel.sequence_parallel else 1)
    split = heads + 2 * keys + heads + (3 if args.get("swiglu") else 2) * ffn
    if training.attention == "unfused" and training.recompute == "none":
        split += 2 * dims.num_attention_heads * training.seq_length
    return whole + split // parallel.tp
