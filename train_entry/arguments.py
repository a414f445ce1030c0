"""Megatron-LM's arguments of a run: those of its configuration, over those of the checkpoint that it starts from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcore_convert.checkpoints.identify import Model
from mcore_convert.errors import ConfigError
from mcore_convert.spec.config.arguments import normalise, padded_vocab_size, plain
from mcore_convert.spec.config.completion import complete
from train_entry.checkpoints.architecture import means_the_same
from train_entry.config.layouts import etp_of
from train_entry.config.schema import Config

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

# Fields of `model` that decide how it is trained, not what it is: a checkpoint may have other values.
FREE = (
    "make_vocab_size_divisible_by",
    "init_method_std",
    "hidden_dropout",
    "attention_dropout",
    "moe_router_load_balancing_type",
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
)
NEEDED = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings", "vocab_size")
RENAMED = {"norm_epsilon": "layernorm_epsilon"}


def megatron_arguments(config: Config, origin: Model | None, *, vocab_size: int | None = None) -> dict[str, Any]:
    """Return all arguments of the run, under Megatron-LM's names and as its checkpoints store them.

    Args:
        origin: the model of the checkpoint that the run starts from.
        vocab_size: the tokenizer's, for a new model that does not state its own; else `model.default_vocab_size`.

    Raises:
        ConfigError: the configuration contradicts the checkpoint, or neither describes a model.
    """
    given = {name: value for name, value in config.model.model_dump().items() if value is not None}
    vocab_size = vocab_size or given.get("default_vocab_size")
    for name in ("default_vocab_size", "provider"):  # not part of an architecture
        given.pop(name, None)
    architecture = {RENAMED.get(name, name): value for name, value in given.items()}
    if "num_query_groups" in architecture:
        architecture["group_query_attention"] = True
    if origin is not None:
        _refuse_another(architecture, origin)
        architecture = {**origin.args, **{name: architecture[name] for name in FREE if name in architecture}}
    elif "vocab_size" not in architecture and vocab_size is not None:
        architecture["vocab_size"] = vocab_size
    missing = [f"model.{name}" for name in NEEDED if architecture.get(name) is None]
    if missing:
        raise ConfigError(
            "the configuration does not describe a model",
            items=missing,
            hint="choose a model (`model=tiny-gpt2`), or a checkpoint to start from (`checkpoint.init=PATH`)",
        )
    return {**_completed(config, normalise(architecture)), **_of_run(config)}


def _completed(config: Config, architecture: Mapping[str, Any]) -> dict[str, Any]:
    """Return the complete arguments of an architecture, at this layout and precision."""
    parallel, vocab = config.parallel, architecture["vocab_size"]
    args = complete(
        plain(architecture),
        dtype=DTYPES[config.training.precision],
        tp=parallel.tp,
        pp=parallel.pp,
        vpp=parallel.vpp,
        tokenizer_model=config.data.tokenizer,
        vocab_size=vocab,
    )
    divisible = config.model.make_vocab_size_divisible_by
    return {**args, "padded_vocab_size": padded_vocab_size(vocab, parallel.tp, divisible)}


def _of_run(config: Config) -> dict[str, Any]:
    """Return the run's configuration under Megatron-LM's names: batches, layout, precision and optimizer."""
    parallel, training, optimizer, model = config.parallel, config.training, config.optimizer, config.model
    vpp = parallel.vpp if parallel.vpp and parallel.vpp > 1 else None
    return {
        "transformer_impl": training.transformer_impl,
        "seq_length": training.seq_length,
        "micro_batch_size": training.micro_batch_size,
        "global_batch_size": training.global_batch_size,
        "train_iters": training.steps,
        "seed": training.seed,
        "tensor_model_parallel_size": parallel.tp,
        "pipeline_model_parallel_size": parallel.pp,
        "virtual_pipeline_model_parallel_size": vpp,
        "context_parallel_size": parallel.cp,
        "expert_model_parallel_size": parallel.ep,
        "expert_tensor_parallel_size": etp_of(parallel),
        "sequence_parallel": parallel.sequence_parallel,
        "decoder_first_pipeline_num_layers": parallel.first_stage_layers,
        "decoder_last_pipeline_num_layers": parallel.last_stage_layers,
        "use_distributed_optimizer": parallel.distributed_optimizer,
        "optimizer": "sgd" if optimizer.name == "sgd" else "adam",
        "lr": optimizer.lr,
        "min_lr": optimizer.min_lr,
        "weight_decay": optimizer.weight_decay,
        "adam_beta1": optimizer.beta1,
        "adam_beta2": optimizer.beta2,
        "adam_eps": optimizer.eps,
        "clip_grad": optimizer.clip_grad,
        "hidden_dropout": model.hidden_dropout,
        "attention_dropout": model.attention_dropout,
        "init_method_std": model.init_method_std,
        "moe_router_load_balancing_type": model.moe_router_load_balancing_type,
        "moe_aux_loss_coeff": model.moe_aux_loss_coeff,
        "moe_z_loss_coeff": model.moe_z_loss_coeff,
        "calculate_per_token_loss": True,
        "no_save_optim": not config.checkpoint.save_optimizer or None,
        "no_save_rng": None,
        "consumed_train_samples": 0,
    }


def _refuse_another(given: Mapping[str, Any], origin: Model) -> None:
    """Refuse a configuration of another architecture than the checkpoint's.

    Raises:
        ConfigError: names every value that differs.
    """
    there = origin.args
    differing = [
        f"{name}: {given[name]!r}, where the checkpoint has {there.get(name)!r}"
        for name in given
        if name not in FREE and not means_the_same(given[name], there.get(name))
    ]
    if differing:
        raise ConfigError(
            f"`{origin.checkpoint.path}` is a model of another architecture than the configuration's",
            items=differing,
            hint="`model=checkpoint` takes the architecture from the checkpoint",
        )
