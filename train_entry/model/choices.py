"""From what a run asks for to how its model is computed: layers, settings, loss, and what is compiled."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mcore_convert.errors import ConfigError
from mcore_convert.megatron.model import Choices, local_block_spec
from train_entry.config.schema import Config
from train_entry.model.attention import SdpaAttention
from train_entry.model.compiled import compile_layers, compiler_missing
from train_entry.model.loss import model_class

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules


@dataclass(frozen=True)
class Computation:
    """How a model is built and computed.

    `choices` go to `build_stages`; `finish` is called once on the stages in their data-parallel wrappers. `remarks`
    are for the user: what was chosen and could not be, in whole sentences.
    """

    choices: Choices
    finish: Callable[[Sequence[Any]], None]
    remarks: tuple[str, ...] = ()


def select(config: Config, args: Mapping[str, Any], device: torch.device) -> Computation:
    """How to compute the model of a run on this device.

    Raises:
        ConfigError: Transformer Engine is asked for and not installed, or a compiler that is missing, or attention that
            does not go with the layout.
    """
    training = config.training
    settings: dict[str, Any] = {}
    remarks: list[str] = []
    if training.transformer_impl == "transformer_engine":
        if importlib.util.find_spec("transformer_engine") is None:
            raise ConfigError(
                "`training.transformer_impl` is `transformer_engine`, which is not installed",
                hint="pip install transformer_engine[pytorch], or leave it at `local`",
            )
        return Computation(
            Choices(settings, _transformer_engine_spec, model_class(False, args["vocab_size"])), _nothing
        )
    unfused = training.attention == "unfused"
    if unfused and config.parallel.cp > 1:
        raise ConfigError("`training.attention` = `unfused` does not go with context parallelism", hint="leave it out")
    if not unfused and training.recompute == "selective":
        settings["recompute_granularity"] = None
        remarks.append("Selective recomputation is left out: attention over torch's kernels keeps no scores.")
    compiled = training.compile == "layers" or (training.compile == "auto" and device.type == "cuda")
    if compiled and args.get("num_experts"):
        if training.compile == "layers":
            raise ConfigError(
                "`training.compile` = `layers` does not go with experts: their shapes change all the time"
            )
        compiled = False
    if compiled and (missing := compiler_missing(device)):
        if training.compile == "layers":
            raise ConfigError(f"`training.compile` = `layers`, but nothing can be compiled here: {missing}")
        remarks.append(f"Layers are not compiled, and slower for it: {missing}")
        compiled = False
    spec = None if unfused else _sdpa_spec
    return Computation(
        Choices(settings, spec, model_class(compiled, args["vocab_size"])),
        compile_layers if compiled else _nothing,
        tuple(remarks),
    )


def _nothing(_: Sequence[Any]) -> None:
    """Nothing is to be done once the model is wrapped."""


def _sdpa_spec(config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Megatron's local layers, with attention over torch's kernels."""
    block = local_block_spec(config, vp_stage)
    for layer in block.layer_specs or ():
        layer.submodules.self_attention.submodules.core_attention = SdpaAttention
    return block


def _transformer_engine_spec(config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
