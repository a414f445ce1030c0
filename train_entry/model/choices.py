"""Choices of how a run's model is computed: layers, settings, loss, and compilation."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mcore_convert.errors import ConfigError
from mcore_convert.megatron.model import Choices
from train_entry.config.schema import Config
from train_entry.model.compiled import compile_layers, compiler_missing
from train_entry.model.gpt import model_class
from train_entry.model.layers import graph_settings, graph_spec, sdpa_spec

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules


@dataclass(frozen=True)
class Computation:
    """Construction and computation of a model.

    `choices` go to `build_stages`; `finish` is called once on the stages in their data-parallel wrappers. `remarks`
    are whole sentences for the user about choices that were not possible.
    """

    choices: Choices
    finish: Callable[[Sequence[Any]], None]
    remarks: tuple[str, ...] = ()


def select(config: Config, args: Mapping[str, Any], device: torch.device) -> Computation:
    """Return the computation of a run's model on this device.

    Raises:
        ConfigError: Transformer Engine or a compiler is requested and not installed, or attention that the layout does
            not
            support.
    """
    training, vocab_size = config.training, args["vocab_size"]
    if training.transformer_impl == "transformer_engine":
        if importlib.util.find_spec("transformer_engine") is None:
            raise ConfigError(
                "`training.transformer_impl` is `transformer_engine`, which is not installed",
                hint="pip install transformer_engine[pytorch], or leave it at `local`",
            )
        return Computation(Choices({}, _transformer_engine_spec, model_class(vocab_size)), _nothing)
    if training.attention == "unfused":
        if config.parallel.cp > 1:
            raise ConfigError("`training.attention` = `unfused` does not go with context parallelism")
        if training.compile == "layers":
            raise ConfigError("`training.compile` = `layers` does not go with `training.attention` = `unfused`")
        return Computation(Choices({}, None, model_class(vocab_size)), _nothing)
    remarks: list[str] = []
    settings: dict[str, Any] = {}
    if training.recompute == "selective":
        settings["recompute_granularity"] = None
        remarks.append("Selective recomputation is left out: attention over torch's kernels keeps no scores.")
    compiled = training.compile == "layers" or (training.compile == "auto" and device.type == "cuda")
    if compiled and (obstacle := _obstacle(args, device)):
        if training.compile == "layers":
            raise ConfigError(f"`training.compile` = `layers`, but {obstacle}")
        remarks.append(f"Layers are not compiled, and slower for it: {obstacle}.")
        compiled = False
    if not compiled:
        return Computation(Choices(settings, sdpa_spec, model_class(vocab_size)), _nothing, tuple(remarks))
    model = model_class(vocab_size, fused_loss=device.type == "cuda", rotary_tables=True)
    return Computation(Choices(settings | graph_settings(args), graph_spec, model), compile_layers, tuple(remarks))


def _obstacle(args: Mapping[str, Any], device: torch.device) -> str | None:
    """Return why layers cannot be compiled; None if they can."""
    if args.get("num_experts"):
        return "each batch gives experts other shapes"
    missing = compiler_missing(device)
    return f"nothing can be compiled here: {missing}" if missing else None


def _nothing(_: Sequence[Any]) -> None:
    """Do nothing once the model is wrapped."""


def _transformer_engine_spec(config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
