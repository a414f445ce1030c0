"""Megatron Core's own reader of a `torch_dist` checkpoint, as proof that it loads one."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_convert.formats.megatron.modules import DENSE_NORM, EXPERT_NORM, FUSED_NORMS
from mcore_convert.megatron.cpu import import_megatron

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel


NORMS = ((DENSE_NORM, EXPERT_NORM), *((own, fused) for fused, own in FUSED_NORMS.items()))


def load_torch_dist(stages: Sequence[GPTModel], path: Path) -> dict[str, Any]:
    """Fill the result of `build_stages` from an `iter_*` or `release` directory, with Megatron-LM's default strictness.

    The requested key dialect is the one that the checkpoint's `content_metadata` names, as in Megatron-LM since 0.13.
    Returns the common part of the checkpoint (`args`, `iteration`, `checkpoint_version`, ...).
    """
    import_megatron()
    from megatron.core import dist_checkpointing

    metadata = dist_checkpointing.load_content_metadata(str(path)) or {}
    wanted = {name: stage.sharded_state_dict(metadata=dict(metadata)) for name, stage in named(stages).items()}
    take_expert_norms(wanted, set(dist_checkpointing.load_tensors_metadata(str(path))))
    state: dict[str, Any] = dist_checkpointing.load(wanted, str(path))
    for name, stage in named(stages).items():
        stage.load_state_dict(state.pop(name))
    return state


def take_expert_norms(wanted: Mapping[str, Mapping[str, Any]], keys: Container[str]) -> None:
    """Request norms under Transformer Engine's names where the checkpoint lacks those of the local layer spec."""
    for stage in wanted.values():
        for entry in stage.values():
            if entry.key not in keys:
                others = (entry.key.replace(ours, theirs) for ours, theirs in NORMS if ours in entry.key)
                entry.key = next((key for key in others if key in keys), entry.key)


def named(stages: Sequence[GPTModel]) -> dict[str, GPTModel]:
    """Return the stages by their names in Megatron-LM's state dict."""
    if len(stages) == 1:
        return {"model": stages[0]}
    return {f"model{index}": stage for index, stage in enumerate(stages)}
