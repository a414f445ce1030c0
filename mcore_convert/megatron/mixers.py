"""Megatron Core's hybrids, with plain torch in place of the kernels of Mamba mixers.

If `mamba_ssm` and `einops` are not installed, stand-ins for them are present while Megatron Core imports its mixer,
which is then its own class with other functions inside. They compute step by step, in fp32.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import math
import re
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from mcore_convert.megatron.cpu import import_megatron
from mcore_convert.megatron.norm import Norm

if TYPE_CHECKING:
    from megatron.core.transformer import ModuleSpec, TransformerConfig


@functools.cache
def import_hybrids() -> None:
    """Import the modules of hybrids once."""
    import_megatron()
    with _stand_ins():
        import megatron.core.models.mamba
        import megatron.core.ssm.mamba_block
        import megatron.core.ssm.mamba_mixer
    # each mixer logs a warning that training needs a kernel; no mixer is trained here
    megatron.core.ssm.mamba_mixer.logger.setLevel(logging.ERROR)
    if importlib.util.find_spec("transformer_engine") is None:  # the final norm is always Transformer Engine's
        megatron.core.ssm.mamba_block.TENorm = Norm


def hybrid_stack(config: TransformerConfig, attention: ModuleSpec, experts: ModuleSpec | None) -> ModuleSpec:
    """Return Megatron Core's stack of unlike layers with its own linear layers, which its specs do not have.

    Args:
        attention: a layer of a `GPTModel` with attention and an MLP, each of which becomes a layer of its own.
        experts: the same with experts.
    """
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.ssm.mamba_block import MambaStack, MambaStackSubmodules
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer import ModuleSpec
    from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

    def half(layer: ModuleSpec | None, *names: str) -> Any:
        if layer is None:
            return None
        keys = ("sharded_state_dict_keys_map", *names)
        parts = TransformerLayerSubmodules(**{name: getattr(layer.submodules, name) for name in keys})
        return ModuleSpec(module=layer.module, submodules=parts)

    mixer = MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    mamba = MambaLayerSubmodules(
        norm=ModuleSpec(module=Norm, params={"eps": config.layernorm_epsilon}),
        mixer=ModuleSpec(module=MambaMixer, submodules=mixer),
        mamba_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map={"norm.": "mixer.in_proj.layer_norm_"},
    )
    after = ("pre_mlp_layernorm", "mlp", "mlp_bda")
    return ModuleSpec(
        module=MambaStack,
        submodules=MambaStackSubmodules(
            mamba_layer=ModuleSpec(module=MambaLayer, submodules=mamba),
            attention_layer=half(attention, "input_layernorm", "self_attention", "self_attn_bda"),
            mlp_layer=half(attention, *after),
            moe_layer=half(experts, *after),
        ),
    )


@contextlib.contextmanager
def _stand_ins() -> Iterator[None]:
    """Scope in which modules that are not installed can be imported, with the names that Megatron Core uses of them."""
    kernels = "mamba_ssm.ops.triton"
    in_serving = ("tensor_get_slice_after", "tensor_masked_update", "tensor_merge")  # not used by the models here
    wanted: dict[str, dict[str, dict[str, Any]]] = {
        "mamba_ssm": {
            "mamba_ssm": {},
            "mamba_ssm.ops": {},
            kernels: {},
            f"{kernels}.layernorm_gated": {"RMSNorm": GatedNorm},
            f"{kernels}.ssd_combined": {"mamba_chunk_scan_combined": scan, "mamba_split_conv1d_scan_combined": None},
        },
        "einops": {"einops": {"rearrange": rearrange, "repeat": None}},
        "triton": {
            "megatron.core.inference.contexts.attention_context.triton.tensor_ops": dict.fromkeys(in_serving),
        },
    }
    missing = [package for package in wanted if importlib.util.find_spec(package) is None]
    added = {name: content for package in missing for name, content in wanted[package].items()}
    for name, content in added.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(content)
    try:
        yield
    finally:
        for name in added:
            del sys.modules[name]


def scan(x: Tensor, dt: Tensor, decay: Tensor, write: Tensor, read: Tensor, _chunk: int, **options: Any) -> Tensor:
    """Return the recurrence of a mixer, position by position, with the arguments of `mamba_chunk_scan_combined`.

    Shapes: x and the result `[batch, length, heads, size]`, dt `[batch, length, heads]`, write (B) and read (C)
    `[batch, length, groups, states]`, and `[heads]` the decay (A), `D` and `dt_bias`.
    """
    heads = x.shape[2]
    step = functional.softplus(dt.float() + options["dt_bias"])
    write, read = (each.float().repeat_interleave(heads // each.shape[2], dim=2) for each in (write, read))
    state = torch.zeros(x.shape[0], heads, x.shape[3], write.shape[3], device=x.device)
    results = []
    for at in range(x.shape[1]):
        now, value = step[:, at], x[:, at].float()
        added = (now[..., None] * value)[..., None] * write[:, at, :, None]
        state = state * torch.exp(now * decay)[..., None, None] + added
        results.append((state * read[:, at, :, None]).sum(-1) + options["D"][:, None] * value)
    return torch.stack(results, dim=1).to(x.dtype)


class GatedNorm(torch.nn.Module):
    """RMSNorm of each group of channels, applied after gating."""

    def __init__(self, hidden_size: int, *, eps: float, group_size: int, device: Any, dtype: Any, **_: Any) -> None:
        super().__init__()
        self.eps, self.group_size = eps, group_size
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))

    def forward(self, hidden: Tensor, gate: Tensor) -> Tensor:
        gated = hidden.float() * functional.silu(gate.float())
        groups = gated.unflatten(-1, (-1, self.group_size))
        normed = functional.rms_norm(groups, (self.group_size,), eps=self.eps).flatten(-2)
        return (normed * self.weight).to(hidden.dtype)


def rearrange(tensor: Tensor, pattern: str, **sizes: int) -> Tensor:
    """Return a tensor with its axes named, split and permuted, as `b l (h p) -> l b h p`; `1` is a dropped axis."""
    source, target = ([(group or name).split() for group, name in _AXES.findall(side)] for side in pattern.split("->"))
    for axes, length in zip(source, tensor.shape, strict=True):
        known = math.prod(sizes[axis] for axis in axes if axis in sizes)
        sizes |= {axis: length // known for axis in axes if axis not in sizes}
    flat = [axis for axes in source for axis in axes]
    kept = [flat.index(axis) for axes in target for axis in axes]
    left = [at for at in range(len(flat)) if at not in kept]
    moved = tensor.reshape([sizes[axis] for axis in flat]).permute(*kept, *left)
    return moved.reshape([math.prod(sizes[axis] for axis in axes) for axes in target])


_AXES = re.compile(r"\(([^)]*)\)|(\S+)")
