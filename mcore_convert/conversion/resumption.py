"""Other state that a run resumes from: random states of its ranks, and a configuration for Megatron-Bridge."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcore_convert.checkpoints.identify import Model
from mcore_convert.formats.base import Checkpoint
from mcore_convert.formats.files.yaml_file import yaml_text
from mcore_convert.formats.random_states import RandomStates
from mcore_convert.formats.registry import target_named
from mcore_convert.spec import hybrid
from mcore_convert.spec.config import bridge
from mcore_convert.spec.layout import Layout


def random_states(source: Checkpoint, target_format: str, layout: Layout) -> RandomStates | None:
    """Return the random states of a run if the target has the same ranks; None otherwise."""
    axis = target_named(target_format).random_axis
    states = None if axis is None else source.random_states
    return states if states is not None and axis is not None and states.fit(layout, axis) else None


def run_config(model: Model, args: Mapping[str, Any], *, optimizer: bool, random: bool) -> str | None:
    """Return the source's own `run_config.yaml` for another layout, or one made from the arguments.

    It states the size of the vocabulary, which a run leaves to its tokenizer.
    """
    recorded = model.checkpoint.common.recorded
    if recorded is not None and recorded.tree is not None:
        return yaml_text(bridge.rewritten(recorded.tree, args, optimizer=optimizer, random=random))
    if hybrid.is_hybrid(
        args
    ):  # Megatron-Bridge's class of them, and its field for the pattern, changed in every release
        return None
    if model.refusals:  # the stored arguments of a model of unknown family say more than a partial file
        return None
    return bridge.run_config({**args, "vocab_size": model.dims.vocab_size, "tokenizer_type": None}, model.family.name)
