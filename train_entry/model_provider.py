"""`model_provider`: the model of a run, stage by stage, as Megatron Core builds it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from mcore_convert.megatron.cpu import without_cuda
from mcore_convert.megatron.model import Choices, build_stages
from train_entry.config.named import named
from train_entry.config.schema import Config

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def model_provider(config: Config, args: Mapping[str, Any], choices: Choices | None = None) -> list[GPTModel]:
    """Build the stages of the model on this rank: one, or one per virtual pipeline stage. New weights are random.

    Args:
        args: Megatron-LM's arguments, from `megatron_arguments`.
        choices: how layers are computed.
    """
    chosen = choices or Choices()
    settings = {**settings_of(config, args), **chosen.settings}
    wanted = Choices(settings, chosen.block_spec, chosen.model_class)
    stages = build_stages(args, dtype=DTYPES[config.training.precision], choices=wanted)
    device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
    return [stage.to(device).train() for stage in stages]


def frozen(
    config: Config, args: Mapping[str, Any], choices: Choices | None = None, provider: Callable[..., Any] | None = None
) -> list[Any]:
    """Build the stages of a model that is not trained, as a reference. Its weights are to be loaded."""
    stages = model_provider(config, args, choices) if provider is None else own_stages(config, provider)
    return [stage.eval().requires_grad_(False) for stage in stages]


def provider_of(config: Config) -> Callable[..., Any] | None:
    """Return the model provider that a configuration names; None if it names none.

    Raises:
        ConfigError: there is no such function.
    """
    name = config.model.provider
    return named("model.provider", name, what="function") if name else None


def own_stages(config: Config, provider: Callable[..., Any]) -> list[Any]:
    """Build the stages of this rank by the user's model provider, which is called as Megatron-LM calls one.

    `provider(pre_process=..., post_process=...)` for each stage, with `vp_stage` if there are virtual ones. Its weights
    are kept. The settings that Megatron's schedules and this trainer rely on are set in its config.
    """
    from megatron.core import parallel_state

    vpp = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    stages = []
    for stage in range(vpp) if vpp else [None]:
        ends = {
            "pre_process": parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            "post_process": parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        }
        with without_cuda():
            model = provider(**ends, **({} if stage is None else {"vp_stage": stage}))
        for name, value in _agreed(config).items():
            setattr(model.config, name, value)
        stages.append(model.to(torch.cuda.current_device() if torch.cuda.is_available() else "cpu").train())
    return stages


def _agreed(config: Config) -> dict[str, Any]:
    """Return the settings that a schedule reads, and that this trainer relies on."""
    interleaved = config.parallel.vpp is not None and config.parallel.vpp > 1
    return {
        # the sum of token losses over their number: the same at every layout and with any mask
        "calculate_per_token_loss": True,
        # with batched messages, two pipeline ranks with virtual stages mistake each other's activations for gradients
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
        # gloo still reads an output while it is being sent: if freed, virtual stages would train on later data
        "deallocate_pipeline_outputs": torch.cuda.is_available(),
    }


def settings_of(config: Config, args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `TransformerConfig` that training determines."""
    model, parallel, training = config.model, config.parallel, config.training
    settings: dict[str, Any] = {
        "hidden_dropout": model.hidden_dropout,
        "attention_dropout": model.attention_dropout,
        "init_method_std": model.init_method_std,
        "perform_initialization": True,  # also marks the weights that tensor parallelism cuts, which identifies norms
        "sequence_parallel": parallel.sequence_parallel,
        **_agreed(config),
        "deterministic_mode": training.deterministic,
    }
    if training.recompute == "full":
        settings |= {"recompute_granularity": "full", "recompute_method": "uniform"}
        settings["recompute_num_layers"] = training.recompute_num_layers
    elif training.recompute == "selective":
        settings |= {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    if args.get("num_experts"):
        # with a loss per token, Megatron Core 0.16.1 weighs both losses by the tokens of a rank, not of a sequence
        # (moe/router.py:467, :498): with two ranks per sequence they would count half
        ranks = parallel.tp * parallel.cp
        settings |= {
            "moe_router_load_balancing_type": model.moe_router_load_balancing_type,
            "moe_aux_loss_coeff": model.moe_aux_loss_coeff * ranks,
            "moe_z_loss_coeff": model.moe_z_loss_coeff and model.moe_z_loss_coeff * ranks,
            "moe_token_dispatcher_type": "alltoall" if torch.cuda.is_available() else "allgather",
        }
    return settings
