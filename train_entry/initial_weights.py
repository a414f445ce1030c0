"""New weights that depend on the seed alone, not on the layout.

Megatron Core draws them rank by rank, so that a run with other pipeline stages would start from another model.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mcore_convert.megatron.checkpoint import named

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
NARROW = ("self_attention.linear_proj.weight", "mlp.linear_fc2.weight", "linear_fc2.weight")  # scaled by the depth


@torch.no_grad()
def draw_weights(stages: Sequence[GPTModel], args: Mapping[str, Any], seed: int) -> None:
    """Draw every matrix of these stages anew: normal, with `init_method_std`, which layers that write to the residual
    stream divide by the root of twice the number of layers, as in Megatron and GPT-2.

    Norms and biases stay ones and zeros. One whole tensor is allocated at a time, on the device of its part.
    """
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    std = args["init_method_std"]
    narrow = std / math.sqrt(2.0 * args["num_layers"])
    for stage in named(stages).values():
        for value in _leaves(stage.sharded_state_dict()):
            parts = _leaves(value.build()) if isinstance(value, ShardedTensorFactory) else [value]
            for part in parts:
                if isinstance(part, ShardedTensor) and part.data.ndim == 2:
                    _fill(part, narrow if part.key.endswith(NARROW) else std, seed, args["vocab_size"])


def _leaves(tree: Any) -> list[Any]:
    if isinstance(tree, Mapping):
        return [leaf for value in tree.values() for leaf in _leaves(value)]
    if isinstance(tree, list | tuple):
        return [leaf for value in tree for leaf in _leaves(value)]
    return [tree]


def _fill(part: Any, std: float, seed: int, vocab_size: int) -> None:
    """Fill a local tensor, which is a view of its parameter, with its box of the global tensor.

    Leading axes of the global tensor are layers and experts: each of their entries has its own stream.
    """
    leading = part.prepend_axis_num
    name = f"{part.key}{part.global_offset[:leading]}"
    rows, columns = part.global_shape[leading:]
    row, column = part.global_offset[leading:]
    local: Tensor = part.data
    if part.key in VOCABULARY:  # padding rows come last, from a stream of their own: their number depends on the layout
        words = _normal(name, seed, (vocab_size, columns), std, local)
        padding = _normal(f"{name} padding", seed, (rows - vocab_size, columns), std, local)
        whole = torch.cat([words, padding])
    else:
        whole = _normal(name, seed, (rows, columns), std, local)
    local.copy_(whole[row : row + local.shape[0], column : column + local.shape[1]])


def _normal(name: str, seed: int, shape: tuple[int, int], std: float, like: Tensor) -> Tensor:
    # one number of 32 bits: torch's CPU generator uses no more of a seed
    generator = torch.Generator(like.device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    return torch.randn(shape, generator=generator, device=like.device, dtype=torch.float32).mul_(std)
