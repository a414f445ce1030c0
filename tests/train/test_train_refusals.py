"""Refusals of training before it starts, against what Megatron Core refuses, and what it does where it does not."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path
from typing import Any

import pytest

from mcore_convert.errors import ConfigError
from tests.conftest import HfMaker
from tests.ready import FROM_CHECKPOINTS, data_of, lacks_a_start, start_of
from train_entry.arguments import megatron_arguments
from train_entry.checkpoints.source import source_of
from train_entry.config.compose import load_config
from train_entry.config.files import ready_runs
from train_entry.config.layouts import problems_of_ranks, ranks_of, torchrun
from train_entry.config.refusals import check, check_model
from train_entry.config.schema import Config


def tiny(*overrides: str, source: str = "tiny-gpt2") -> Config:
    """Return a ready run with these overrides."""
    return load_config(source, overrides)


def reasons(config: Config, world_size: int | None = None, device: str | None = "cuda") -> tuple[str, ...]:
    """Return why a run is refused; nothing where it is not."""
    try:
        check(config, world_size or ranks_of(config.parallel), device)
    except ConfigError as error:
        return error.items or (error.message.removeprefix("this run is refused: "),)
    return ()


# what is fine


@pytest.mark.parametrize("name", ready_runs())
def test_ready_runs_are_not_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hf_checkpoint: HfMaker
) -> None:
    monkeypatch.chdir(tmp_path)
    start = start_of(name, tmp_path, hf_checkpoint) if name in FROM_CHECKPOINTS else []
    config = load_config(name, [f"run_dir={tmp_path}/run", *data_of(name, tmp_path), *start])
    assert reasons(config) == ()
    source = source_of(config)
    assert (source is not None) == (name in FROM_CHECKPOINTS)
    check_model(config, megatron_arguments(config, None if source is None else source.model))


@pytest.mark.parametrize("name", FROM_CHECKPOINTS)
def test_a_fine_tuning_needs_a_model_and_data(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (messages, *model) = reasons(load_config(name, ["data.tokenizer=gpt2"]))
    assert messages == "`data.paths` names no data (JSONL files); `data=mock` trains on made-up ones"
    assert [line.partition(":")[0] for line in model] == ["the model is not described"] * lacks_a_start(name)
    start = ["checkpoint.init=org/model"] if lacks_a_start(name) else []
    assert reasons(load_config(name, [*data_of(name, tmp_path), *start])) == ()


def test_a_run_without_a_model_names_what_is_missing() -> None:
    (_, model) = reasons(load_config("finetune", ["data.tokenizer=gpt2"]))
    assert model.startswith("the model is not described: `model.num_layers`, `model.hidden_size`,")


@pytest.mark.parametrize(
    "parallel", ["single", "tp2", "pp2", "tp2-pp2", "pp2-vpp2", "tp2-sp", "tp2-pp2-sp", "cp2", "dp-distributed"]
)
@pytest.mark.parametrize("model", ["tiny-gpt2", "tiny-llama"])
def test_layouts_that_train_are_not_refused(model: str, parallel: str) -> None:
    """Those of tests/train/test_train_layouts.py, which hold their loss curves against each other."""
    assert reasons(tiny(f"parallel={parallel}", source=model), device="cpu") == ()


# what is not


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        # layout
        (["parallel.vpp=2"], "`parallel.vpp` = 2 cuts pipeline stages, and there is one"),
        (["parallel.first_stage_layers=2"], "`parallel.first_stage_layers` = 2 says nothing without pipeline stages"),
        (["parallel.pp=2", "parallel.first_stage_layers=0"], "`parallel.first_stage_layers` = 0: Megatron Core gives"),
        (["parallel.sequence_parallel=true"], "`parallel.sequence_parallel` splits over tensor-parallel ranks"),
        (["parallel.cp=2", "training.seq_length=126"], "`training.seq_length` = 126 is no multiple of 2 x cp = 4"),
        (["parallel=tp2-sp", "training.seq_length=127"], "`training.seq_length` = 127 cannot be split over tp = 2"),
        (
            ["parallel=tp2-sp", "parallel.tp=4", "parallel.cp=3", "training.seq_length=126"],
            "`training.seq_length` = 126 cannot be split over tp x cp = 12",
        ),
        (["parallel.overlap_param_gather=true", "parallel.overlap_grad_reduce=true"], "it needs that"),
        (
            ["parallel.overlap_param_gather=true", "parallel.distributed_optimizer=true"],
            "`parallel.overlap_param_gather` needs `parallel.overlap_grad_reduce`",
        ),
        (["parallel=dp-distributed", "optimizer=sgd"], "it does not go with `optimizer.name` = sgd"),
        # model
        (["parallel.tp=3"], "`num_attention_heads` = 4 cannot be split over tp = 3"),
        (["model.num_query_groups=3"], "`num_attention_heads` = 4 cannot share `num_query_groups` = 3"),
        (
            ["model.num_attention_heads=12", "model.num_query_groups=6", "parallel.tp=4", "model.hidden_size=192"],
            "`num_query_groups` = 6 can neither be split over tp = 4 nor be shared by it",
        ),
        (["model.ffn_hidden_size=511", "parallel.tp=2"], "`ffn_hidden_size` = 511 cannot be split over tp = 2"),
        (["model.hidden_size=130"], "`hidden_size` = 130 is no multiple of `num_attention_heads` = 4"),
        (["training.seq_length=512"], "`training.seq_length` = 512 is longer than the model"),
        (["parallel.pp=3"], "4 layers do not fit pp = 3: 4 layers cannot be split evenly over 3 pipeline stages"),
        (["parallel.pp=2", "parallel.vpp=4"], "4 layers do not fit pp = 2, vpp = 4"),
        (["training.recompute=full", "training.recompute_num_layers=3"], "does not divide the 4 layers of a stage"),
        (["model.num_layers=null"], "the model is not described: `model.num_layers`; choose one"),
        (["model.default_vocab_size=null"], "the model is not described: `model.vocab_size` (or `data.tokenizer`)"),
        (["parallel.ep=2"], "`parallel.ep` = 2 splits experts, and the model has none"),
        # schedule
        (["optimizer.min_lr=1"], "`optimizer.min_lr` = 1 is above `optimizer.lr` = 0.001"),
        (["schedule.warmup_steps=100"], "`schedule.warmup_steps` = 100 is not below `training.steps` = 100"),
        (["schedule.warmup_steps=9", "schedule.decay_steps=9"], "is not below `schedule.decay_steps` = 9"),
        (["schedule.style=WSD"], "`schedule.wsd_decay_steps` is not given"),
        (["schedule.style=WSD", "schedule.wsd_decay_steps=101"], "is more than the 100 steps after the warmup"),
        (["schedule.style=inverse-square-root"], "and `schedule.warmup_steps` is 0"),
        # data
        (["data=indexed"], "`data.paths` names no data (`mcore-convert data prepare` makes them)"),
        (["data.valid_paths=[x]"], "`data.valid_paths` names data and `data.kind` = mock makes them up"),
        (["data=indexed", "data.paths=[/no]"], "`data.paths`: `/no.bin` and `/no.idx` do not exist"),
        (["data=indexed", "data.paths=[/no.bin]"], "`/no.bin` is written without its ending: `/no`"),
        (["data=indexed", "data.paths=[/no]", "data.train_paths=[/no]"], "stands instead of it: give one of them"),
        (["data=indexed", "data.paths=[/no]", "data.test_paths=[/no]"], "go with `data.train_paths`"),
        (["data=indexed", "data.paths=[/no]", "data.weights=[1,2]"], "`data.weights` has 2 weights for 1 paths"),
        (["data=sft", "data.paths=[/no.jsonl]"], "`data.paths`: `/no.jsonl` does not exist"),
        (["data=sft", "data.paths=[/]"], "`data.tokenizer` is not given, and there is no checkpoint"),
        (["data.split=a,b"], "`data.split` = a,b is not three shares"),
        (["data.split=1,2,3,4"], "`data.split` = 1,2,3,4 is not three shares"),
        (["data=indexed", "data.split=0,1,1"], "`data.split` = 0,1,1 leaves nothing to train on"),
        (["data=indexed", "data.split=1,0,0", "training.eval_steps=2"], "`data.split` = 1,0,0 has no share for them"),
        (["data=indexed", "data.train_paths=[/no]", "training.eval_steps=2"], "`data.valid_paths` is empty for them"),
        (["data.eod_mask_loss=true"], "`data.eod_mask_loss` is for documents in indexed data"),
        # start and end
        (["checkpoint.init=./no"], "`checkpoint.init` = ./no does not exist"),
        (["checkpoint.load=no"], "`checkpoint.load` = no does not exist"),
        (["checkpoint.init=gpt2", "checkpoint.load=/"], "give one of them"),
        (["checkpoint.revision=main"], "`checkpoint.revision` is that of a Hub id in `checkpoint.init`"),
        (["checkpoint.keep_last=2"], "`checkpoint.keep_last` = 2 without `checkpoint.save_interval`"),
        (["checkpoint=none", "checkpoint.save_interval=2"], "`checkpoint.save_interval` = 2 wants checkpoints"),
        (["checkpoint=none", "checkpoint.export_hf=end"], "`checkpoint.export_hf` = end wants checkpoints"),
        (["training.eval_interval=2"], "nothing would be evaluated"),
        (["run_dir=/etc/hostname/x"], "`run_dir` = /etc/hostname/x cannot be made: `/etc/hostname` is a file"),
        # computation
        (["training.transformer_impl=transformer_engine"], "Transformer Engine is not installed"),
        (
            ["training.transformer_impl=transformer_engine", "training.attention=sdpa"],
            "`training.attention` = sdpa is for local layers",
        ),
        (["parallel=cp2", "training.attention=unfused"], "`training.attention` = unfused sees a rank's own part"),
        (["data=sft", "parallel=cp2"], "`data.packed` examples would be cut apart by context parallelism"),
        (
            ["data=sft", "training.transformer_impl=transformer_engine"],
            "`data.packed` examples would see each other: Transformer Engine",
        ),
        (["training.flow=mine"], "`training.flow` = mine is not module:Class"),
    ],
)
def test_a_run_is_refused(overrides: list[str], line: str) -> None:
    messages = reasons(tiny(*overrides))
    assert [reason for reason in messages if line in reason], messages


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["parallel.ep=3", "training.global_batch_size=9"], "`num_experts` = 4 cannot be split over ep = 3"),
        (["parallel.tp=2"], "Megatron Core trains experts under tensor parallelism only with"),
        (["parallel=tp2-sp", "model.moe_ffn_hidden_size=161"], "`moe_ffn_hidden_size` = 161 cannot be split over etp"),
        (["parallel=tp2-sp", "model.add_bias_linear=true"], "experts with biases (`add_bias_linear`) cannot be split"),
        (["model.moe_router_topk=5"], "`moe_router_topk` = 5 is more than there are experts, `num_experts` = 4"),
        (["model.moe_router_topk=1"], "the softmax of one number has no gradient"),
        (["model.moe_router_load_balancing_type=sinkhorn"], "set `model.moe_aux_loss_coeff` to 0"),
        (["training.compile=layers"], "`training.compile` = layers does not go with experts"),
    ],
)
def test_a_run_with_experts_is_refused(overrides: list[str], line: str) -> None:
    (reason,) = reasons(tiny("model=tiny-llama-moe", *overrides, source="tiny-llama"))
    assert line in reason


def test_all_reasons_are_reported_at_once() -> None:
    config = tiny("parallel=tp2-pp2", "parallel.tp=3", "optimizer.min_lr=1", "data=indexed", "checkpoint.keep_last=1")
    with pytest.raises(ConfigError) as caught:
        check(config, 8, "cpu")
    assert caught.value.message == "this run is refused, for 6 reasons"
    assert len(caught.value.items) == 6


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["training.precision=fp16"], "`training.precision` = fp16 is for GPUs"),
        (
            ["training.transformer_impl=transformer_engine"],
            "`training.transformer_impl` = transformer_engine is for GPUs",
        ),
    ],
)
def test_a_cpu_is_refused_what_is_for_gpus(overrides: list[str], line: str) -> None:
    config = tiny(*overrides)
    assert [reason for reason in reasons(config, device="cpu") if reason.startswith(line)]
    for device in ("cuda", None):
        assert not [reason for reason in reasons(config, device=device) if reason.startswith(line)]


def test_a_package_that_is_missing_is_refused_before_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    result = importlib.util.find_spec

    def without(name: str, package: str | None = None) -> Any:
        return None if name in ("matplotlib", "wandb", "tensorboard") else result(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    messages = reasons(tiny("logging.wandb=true"))
    assert [reason.partition(",")[0] for reason in messages] == [
        "`logging.tensorboard` needs tensorboard",
        "`logging.wandb` needs wandb",
        "`logging.plot` needs matplotlib",
    ]
    assert reasons(tiny("logging=bare")) == ()


def test_a_model_that_no_family_has_is_not_exported() -> None:
    config = tiny("checkpoint=export", "model=tiny-llama-moe", source="tiny-llama")
    args = {**megatron_arguments(config, None), "qk_l2_norm": True}
    with pytest.raises(
        ConfigError, match=r"`checkpoint.export_hf` = end, but no family can represent this model.*: .*qk_l2_norm"
    ):
        check_model(config, args)
    check_model(tiny("checkpoint=export"), megatron_arguments(tiny(), None))


def test_a_model_from_a_checkpoint_is_looked_at_later() -> None:
    config = tiny("model=null", "checkpoint.init=org/model", "parallel.tp=3", "parallel.ep=2")
    assert reasons(config) == ()
    with pytest.raises(ConfigError) as caught:
        check_model(config, megatron_arguments(tiny(), None))
    messages = "\n".join(caught.value.items)
    assert "`num_attention_heads` = 4 cannot be split over tp = 3" in messages
    assert "`parallel.ep` = 2 splits experts, and the model has none" in messages


def test_a_run_that_goes_on_needs_no_start(tmp_path: Path) -> None:
    config = tiny("model=null", "checkpoint.init=./gone", f"run_dir={tmp_path}")
    assert reasons(config) == ("`checkpoint.init` = ./gone does not exist",)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("3")
    assert reasons(config) == ()


# ranks and batches


@pytest.mark.parametrize(
    ("overrides", "ranks", "line"),
    [
        (
            ["parallel=tp2-pp2"],
            1,
            "a multiple of 4 ranks, and there is 1: start it with `torchrun --nproc-per-node 4 -m",
        ),
        (
            ["parallel=tp2-pp2"],
            6,
            "a multiple of 4 ranks, and there are 6: start it with `torchrun --nproc-per-node 4 ",
        ),
        (["parallel.tp=4", "parallel.pp=4", "training.global_batch_size=32"], 33, "`torchrun --nnodes 4 --nproc-per-n"),
        ([], 3, "`training.global_batch_size` = 8 is no multiple of 3"),
        (["training.micro_batch_size=3"], 2, "the next that fit: 6 and 12"),
        (["training.micro_batch_size=16"], 1, "the next that fit: 16"),
        (["parallel=pp2-vpp2", "training.global_batch_size=3"], 2, "a multiple of pp = 2 microbatches in a step"),
    ],
)
def test_ranks_and_batches_that_do_not_fit(overrides: list[str], ranks: int, line: str) -> None:
    (reason,) = problems_of_ranks(tiny(*overrides), ranks)
    assert line in reason


def test_the_ranks_that_are_named_fit() -> None:
    sizes = itertools.product((1, 2, 3), (1, 2), (1, 2), (1, 2, 4), (None, 1, 2))
    for tp, pp, cp, ep, etp in sizes:
        config = tiny_with(parallel={"tp": tp, "pp": pp, "cp": cp, "ep": ep, "etp": etp})
        unit = ranks_of(config.parallel)
        fitting = [
            n for n in range(1, 100) if n % (tp * pp * cp) == 0 and n % ((etp or (tp if ep == 1 else 1)) * ep * pp) == 0
        ]
        assert unit == fitting[0]
        assert {n % unit for n in fitting} == {0}
    assert torchrun(16) == "torchrun --nnodes 2 --nproc-per-node 8 -m train_entry CONFIG"


BASE = load_config("tiny-llama")


def tiny_with(**groups: dict[str, Any]) -> Config:
    return BASE.with_values(**groups)
