"""Releases of Megatron-LM: the changes in each, and the release that wrote a checkpoint.

Facts are from `megatron/training/arguments.py`, `megatron/core/optimizer/__init__.py` and `distrib_optimizer.py` of
Megatron-LM 0.12.3, 0.13.1, 0.14.0, 0.15.3, 0.16.1, 0.17.1, 0.18.2, 0.19.0 and what will be 0.20 (main, 22 August 2026).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mcore_convert.errors import ConvertError

Release = tuple[int, int]

OLDEST: Release = (0, 8)  # older forms of the distributed optimizer's state are not written
NEWEST: Release = (0, 19)

PIPELINE_LAYOUT: Release = (0, 13)  # --pipeline-model-parallel-layout
GROUPS_OF_ALL_RANKS: Release = (0, 14)  # every rank has every parameter group, some of them without parameters
CHAINS_WITHOUT_PREFIX: Release = (0, 14)  # keys of chained optimizers differ only in their parameters
ORIGINAL_POSITIONS: Release = (0, 14)  # of latent attention's YaRN; before, it uses `max_position_embeddings`
WHOLE_DOWN_PROJECTIONS: Release = (0, 14)  # latent attention's are no longer sharded with Transformer Engine
SINKS: Release = (0, 15)  # offsets of softmax, and biases of the router of experts
FULLY_RESHARDABLE: Release = (0, 15)  # optimizer state in that form; before, `fully_sharded_model_space`
INTERPOLATION: Release = (0, 19)  # `pretrain_gpt.py` uses --rotary-seq-len-interpolation-factor
LION: Release = (0, 19)  # its distributed state is gathered; before, only that of Adam
MTP_MODEL_LAYER: Release = (0, 17)  # the name of the module; `transformer_layer` before, and in `torch_dist`
MTP_LAYER_IN_FSDP: Release = (0, 20)  # Megatron-FSDP saves that module as `transformer_layer` again
MLA_UNFUSED_IN_FSDP: Release = (0, 20)  # it saves latent attention's down-projections as two, even if a run fuses them
OWN_CONVOLUTIONS: Release = (0, 19)  # a Mamba mixer has its convolution's weights itself, not in a module
UNSHIFTED_STATE: Release = (0, 20)  # state that is gathered from several buckets is not shifted by their padding
PATTERN_WITH_STAGES: Release = (0, 17)  # --hybrid-layer-pattern, with stage separators; before, stages are even
MIXER_HEADS: Release = (0, 13)  # --mamba-num-heads; before, a mixer is twice as wide as the model
EXPERTS_IN_HYBRIDS: Release = (0, 16)  # layers of experts in a hybrid
SORTED_GROUPS: Release = (0, 16)  # parameter groups in one order on all ranks; before, in that of parameters

# An argument that every run since a release stores, the newest release first. Runs of 0.12 and before have only the
# last one; a checkpoint with none of them is very old, or was not written by Megatron-LM.
SIGNS: tuple[tuple[Release, str], ...] = (
    ((0, 20), "mtp_hsm"),
    ((0, 19), "mamba_training_ssm_states_dtype"),
    ((0, 17), "muon_scalar_optimizer"),
    ((0, 16), "batch_invariant_mode"),
    ((0, 15), "dist_ckpt_optim_fully_reshardable"),
    ((0, 14), "full_validation"),
    ((0, 13), "inprocess_restart"),
    ((0, 12), "dist_ckpt_strictness"),
)


def parse(text: str) -> Release:
    """Return the release of a version: `0.12`, `0.16.1` or `core_v0.19.0`.

    Raises:
        ConvertError: it is not a version, or too old to write for.
    """
    matched = re.fullmatch(r"(?:core_)?v?(\d+)\.(\d+)(?:[.a-z]\w*)*", text.strip())
    if matched is None:
        raise ConvertError(f"`{text}` is no version of Megatron-LM", hint="write 0.12, 0.16.1 or 0.19")
    release = int(matched[1]), int(matched[2])
    if release < OLDEST:
        raise ConvertError(f"nothing is written for Megatron-LM {text}", hint=f"{spelled(OLDEST)} is the oldest")
    return release


def spelled(release: Release) -> str:
    """Format a release: `0.12`."""
    return f"{release[0]}.{release[1]}"


def of_run(stored: Mapping[str, Any]) -> Release | None:
    """Return the release that stored these arguments, as far as they show: the oldest that has them all."""
    return next((release for release, name in SIGNS if name in stored), None)
