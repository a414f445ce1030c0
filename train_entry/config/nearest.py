"""The name that a user may have meant: the nearest key of the configuration, also by Megatron-LM's arguments."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from train_entry.config.schema import Config

LIKE = 0.6  # of difflib: names that are less alike are not suggested

# Megatron-LM's names, where they differ from our key's own name. On the right a key, or a key with its value.
MEGATRON: Mapping[str, str] = {
    # parallel
    "tensor_model_parallel_size": "parallel.tp",
    "pipeline_model_parallel_size": "parallel.pp",
    "virtual_pipeline_model_parallel_size": "parallel.vpp",
    "num_virtual_stages_per_pipeline_rank": "parallel.vpp",
    "num_layers_per_virtual_pipeline_stage": "parallel.vpp",
    "context_parallel_size": "parallel.cp",
    "expert_model_parallel_size": "parallel.ep",
    "expert_tensor_parallel_size": "parallel.etp",
    "decoder_first_pipeline_num_layers": "parallel.first_stage_layers",
    "decoder_last_pipeline_num_layers": "parallel.last_stage_layers",
    "use_distributed_optimizer": "parallel.distributed_optimizer",
    "ddp_bucket_size": "parallel.bucket_size",
    "distributed_timeout_minutes": "parallel.timeout_minutes",
    # model
    "group_query_attention": "model.num_query_groups",
    "layernorm_epsilon": "model.norm_epsilon",
    "apply_layernorm_1p": "model.layernorm_zero_centered_gamma",
    "disable_bias_linear": "model.add_bias_linear=false",
    "use_rotary_position_embeddings": "model.position_embedding_type=rope",
    "num_moe_experts": "model.num_experts",
    # optimizer and schedule
    "adam_beta1": "optimizer.beta1",
    "adam_beta2": "optimizer.beta2",
    "adam_eps": "optimizer.eps",
    "sgd_momentum": "optimizer.momentum",
    "train_iters": "training.steps",
    "train_samples": "training.steps",
    "lr_decay_style": "schedule.style",
    "lr_decay_iters": "schedule.decay_steps",
    "lr_decay_samples": "schedule.decay_steps",
    "lr_warmup_iters": "schedule.warmup_steps",
    "lr_warmup_samples": "schedule.warmup_steps",
    "lr_warmup_fraction": "schedule.warmup_steps",
    "lr_wsd_decay_iters": "schedule.wsd_decay_steps",
    "lr_wsd_decay_style": "schedule.wsd_decay_style",
    # data
    "data_path": "data.paths",
    "train_data_path": "data.train_paths",
    "valid_data_path": "data.valid_paths",
    "test_data_path": "data.test_paths",
    "data_cache_path": "data.cache_dir",
    "mock_data": "data.kind=mock",
    "tokenizer_type": "data.tokenizer",
    "tokenizer_model": "data.tokenizer",
    # checkpoint
    "save": "run_dir",
    "load": "checkpoint.load",
    "finetune": "checkpoint.init",
    "pretrained_checkpoint": "checkpoint.init",
    "async_save": "checkpoint.asynchronous",
    "no_save_optim": "checkpoint.save_optimizer=false",
    # logging
    "log_interval": "logging.interval",
    "tensorboard_dir": "logging.tensorboard",
    "wandb_exp_name": "logging.wandb_name",
    # training
    "bf16": "training.precision=bf16",
    "fp16": "training.precision=fp16",
    "eval_iters": "training.eval_steps",
    "recompute_granularity": "training.recompute",
    "recompute_activations": "training.recompute=selective",
    "attention_backend": "training.attention",
    "use_flash_attn": "training.attention",
    "deterministic_mode": "training.deterministic",
    "exit_duration_in_mins": "training.exit_after_minutes",
}


@cache
def fields() -> dict[str, dict[str, Any]]:
    """Return every key by its full dotted name, with its JSON schema."""
    whole = Config.model_json_schema()
    schemas: dict[str, dict[str, Any]] = {}
    for name, field in whole["properties"].items():
        group = whole["$defs"].get(field.get("$ref", "").rpartition("/")[2])
        schemas |= {f"{name}.{key}": each for key, each in group["properties"].items()} if group else {name: field}
    return schemas


def keys() -> list[str]:
    """Return every key with its full dotted name."""
    return list(fields())


@cache
def groups() -> list[str]:
    """Return the names of the groups of a configuration."""
    return [name for name in Config.model_fields if name not in fields()]


def nearest_key(wrong: str) -> str | None:
    """Return the key, or group, that a missing one was meant for; None if no name is similar.

    The same name in another group (`lr` is `optimizer.lr`) and Megatron-LM's name for a key take precedence; then a
    similar spelling, first within its own group.
    """
    group, _, name = wrong.lower().replace("-", "_").strip("_.").rpartition(".")
    known = keys()
    by_name: dict[str, str] = {}
    for key in known:
        by_name.setdefault(key.rpartition(".")[2], key)
    same = {**by_name, **MEGATRON} if not group else {**MEGATRON, **by_name}
    if name in same:
        return same[name]
    siblings = [key.rpartition(".")[2] for key in known if key.startswith(f"{group}.")]
    if sibling := nearest(name, siblings):
        return f"{group}.{sibling}"
    spelled = {**{key: key for key in (*groups(), *known)}, **same}
    match = nearest(name, spelled) or nearest(f"{group}.{name}", spelled)
    return spelled[match] if match else None


def nearest(wrong: str, known: Iterable[str]) -> str | None:
    """Return the name with the most similar spelling; None if none is similar enough."""
    matches = difflib.get_close_matches(wrong, list(known), n=1, cutoff=LIKE)
    return matches[0] if matches else None
