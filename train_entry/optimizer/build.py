"""Megatron Core's data-parallel wrapper, optimizer and learning-rate scheduler, from a configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from train_entry.config.schema import Config

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel


def wrap(config: Config, stages: Sequence[GPTModel]) -> list[Any]:
    """Wrap the stages in Megatron's `DistributedDataParallel`, whose buffers hold the gradients in fp32."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

    parallel = config.parallel
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=parallel.distributed_optimizer,
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
        bucket_size=parallel.bucket_size,
    )
    # except in the embedding's stage, gradients of later virtual stages come last: one bucket each
    chunks = [
        DistributedDataParallel(stage.config, ddp, stage, disable_bucketing=number > 0)
        for number, stage in enumerate(stages)
    ]
    for stage in stages:  # virtual stages have a configuration each; the schedule reads the first
        stage.config.finalize_model_grads_func = finalize_model_grads
        if parallel.overlap_grad_reduce:
            stage.config.no_sync_func = _one_or_all([chunk.no_sync for chunk in chunks])
            if len(chunks) > 1:
                stage.config.grad_sync_func = [chunk.start_grad_sync for chunk in chunks]
    return chunks


def build_optimizer(config: Config, chunks: Sequence[Any]) -> Any:
    """Return Megatron's optimizer: AdamW or SGD over fp32 master copies, plain or distributed."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    chosen, precision = config.optimizer, config.training.precision
    model = chunks[0].config
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="sgd" if chosen.name == "sgd" else "adam",
            lr=chosen.lr,
            min_lr=chosen.min_lr,  # parameter groups use this value, not the scheduler's
            weight_decay=chosen.weight_decay,
            adam_beta1=chosen.beta1,
            adam_beta2=chosen.beta2,
            adam_eps=chosen.eps,
            sgd_momentum=chosen.momentum,
            clip_grad=chosen.clip_grad,
            bf16=precision == "bf16",
            fp16=precision == "fp16",
            params_dtype=model.params_dtype,
            initial_loss_scale=chosen.initial_loss_scale,
            loss_scale_window=chosen.loss_scale_window,
            use_distributed_optimizer=config.parallel.distributed_optimizer,
            overlap_param_gather=config.parallel.overlap_param_gather,
        ),
        list(chunks),
    )
    for chunk in chunks:
        chunk.config.grad_scale_func = optimizer.scale_loss
    return optimizer


def build_scheduler(config: Config, optimizer: Any) -> Any:
    """Return Megatron's scheduler, which counts samples. The configuration takes precedence over a checkpoint."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    chosen, schedule, samples = config.optimizer, config.schedule, config.training.global_batch_size
    decay = schedule.decay_steps or config.training.steps
    wsd = schedule.wsd_decay_steps
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=chosen.lr,
        min_lr=chosen.min_lr,
        lr_warmup_steps=min(schedule.warmup_steps, decay - 1) * samples,
        lr_decay_steps=decay * samples,
        lr_decay_style=schedule.style,
        start_wd=chosen.weight_decay,
        end_wd=chosen.weight_decay,
        wd_incr_steps=config.training.steps * samples,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
        wsd_decay_steps=wsd * samples if wsd else None,
        lr_wsd_decay_style=schedule.wsd_decay_style,
    )


def _one_or_all(functions: list[Any]) -> Any:
    return functions[0] if len(functions) == 1 else functions
