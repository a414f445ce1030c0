"""Whole runs that stop and go on, start from a Hugging Face model, and end as one."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mcore_convert import inspect, verify
from tests.conftest import HfMaker, real_checkpoint
from tests.ranks import run_ranks
from train_entry.checkpoints import folder
from train_entry.config.schema import Config
from train_entry.pretrain import pretrain
from train_entry.trainer import Trainer

LENGTH, SAMPLES = 32, 8
TINY = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "max_position_embeddings": LENGTH,
    "vocab_size": 500,
}


def config_of(run_dir: Path, **groups: dict[str, Any]) -> Config:
    config = Config(run_dir=run_dir).with_values(
        training={"seq_length": LENGTH, "global_batch_size": SAMPLES, "micro_batch_size": 2, "steps": 8},
        optimizer={"lr": 1e-2},
        schedule={"warmup_steps": 2},
        logging={"tensorboard": False, "plot": False, "interval": 1},
    )
    return config.with_values(**groups)


def losses(run_dir: Path) -> dict[int, float]:
    """Return the loss of each step, from the run's own record."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {line["iteration"]: line["loss"] for line in lines if "loss" in line and "grad_norm" in line}


def batch_of(step: int, vocab_size: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    text = torch.randint(vocab_size, (SAMPLES, LENGTH + 1), generator=generator)
    return {
        "tokens": text[:, :-1].contiguous(),
        "labels": text[:, 1:].contiguous(),
        "loss_mask": (torch.rand(SAMPLES, LENGTH, generator=generator) < 0.9).float(),
        "position_ids": torch.arange(LENGTH).expand(SAMPLES, LENGTH).contiguous(),
    }


@pytest.mark.parametrize(
    ("parallel", "precision"),
    [({"tp": 2, "distributed_optimizer": True}, "bf16"), ({"pp": 2, "vpp": 2}, "fp32")],
    ids=["tp2-dp2-distributed-bf16", "pp2-vpp2-dp2"],
)
def test_a_run_with_dropout_goes_on_to_the_last_bit(parallel: dict[str, Any], precision: str, tmp_path: Path) -> None:
    """Data, schedule and random streams are taken up where they were: four ranks, two of them data-parallel."""
    model = {**TINY, "num_layers": 4, "hidden_dropout": 0.1, "attention_dropout": 0.1}
    training = {"precision": precision}
    whole = config_of(tmp_path / "whole", model=model, parallel=parallel, training=training)
    run_ranks(4, pretrain, whole.with_values(checkpoint={"save_interval": 3}))
    part = config_of(tmp_path / "part", model=model, parallel=parallel, training=training)
    run_ranks(4, pretrain, part.with_values(checkpoint={"load": str(whole.run_dir / "checkpoints/iter_0000003")}))
    expected = losses(whole.run_dir)
    assert losses(part.run_dir) == {step: expected[step] for step in range(4, 9)}
    assert verify(whole.run_dir / "checkpoints", part.run_dir / "checkpoints").equal


def test_random_streams_begin_at_the_seed_of_their_stage(tmp_path: Path) -> None:
    config = config_of(tmp_path, model=TINY, parallel={"pp": 2}, training={"seed": 7})

    def draw() -> tuple[float, float, float]:
        with Trainer(config) as trainer:
            trainer.initialize()
            return random.random(), float(np.random.random()), float(torch.rand(()))

    for stage, drawn in enumerate(run_ranks(2, draw)):
        seed = 7 + 100 * stage
        expected = torch.rand((), generator=torch.Generator().manual_seed(seed))
        assert drawn == (random.Random(seed).random(), np.random.RandomState(seed).random_sample(), float(expected))


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_a_vocabulary_that_is_padded_to_another_size_fits(before: int, after: int, tmp_path: Path) -> None:
    """100 rows are padded to 128 on one tensor-parallel rank, and to 256 on two; of the optimizer's state, too."""
    model = {**TINY, "vocab_size": 100, "untie_embeddings_and_output_weights": True}
    optimizer = {"distributed_optimizer": True}
    whole = config_of(tmp_path / "whole", model=model, parallel={"tp": before, **optimizer})
    run_ranks(2, pretrain, whole.with_values(checkpoint={"save_interval": 3}))
    load = {"load": str(whole.run_dir / "checkpoints/iter_0000003")}
    part = config_of(tmp_path / "part", model=model, parallel={"tp": after, **optimizer}, checkpoint=load)
    run_ranks(2, pretrain, part)
    rows = [inspect(config.run_dir / "checkpoints").padded_vocab_size for config in (whole, part)]
    assert rows == [128 * before, 128 * after]
    expected = losses(whole.run_dir)
    assert losses(part.run_dir) == pytest.approx({step: expected[step] for step in range(4, 9)}, abs=1e-5)


@pytest.mark.parametrize("name", ["llama_tp2pp2", "gpt2_legacy_tp2pp2"])
def test_a_real_run_of_megatron_lm_goes_on(name: str, tmp_path: Path) -> None:
    """Whichever format it is in, and at any layout with the same losses."""
    source = real_checkpoint(name)
    curves = []
    for count, parallel in ((1, {}), (2, {"tp": 2, "distributed_optimizer": True})):
        config = config_of(
            tmp_path / str(count), training={"seq_length": 16, "steps": 13}, parallel=parallel, optimizer={"lr": 1e-3}
        )
        run_ranks(count, pretrain, config.with_values(checkpoint={"load": str(source), "save": False}))
        curves.append(losses(config.run_dir))
    assert list(curves[0]) == [11, 12, 13]
    assert curves[1] == pytest.approx(curves[0], abs=1e-5)


def test_sigterm_on_one_rank_saves_on_all_and_ends_in_order(tmp_path: Path) -> None:
    whole = config_of(tmp_path / "whole", model=TINY, parallel={"tp": 2})
    run_ranks(2, pretrain, whole)
    config = config_of(tmp_path / "stopped", model=TINY, parallel={"tp": 2}, checkpoint={"asynchronous": True})

    def stopped() -> bool:
        metrics = config.run_dir / "metrics.jsonl"

        def send() -> None:
            while not metrics.exists() or metrics.read_text().count("\n") < 2:
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGTERM)

        before = signal.getsignal(signal.SIGTERM)
        if dist.get_rank() == 1:
            threading.Thread(target=send, daemon=True).start()
        pretrain(config)
        return signal.getsignal(signal.SIGTERM) is before

    assert run_ranks(2, stopped) == [True, True]
    done = len(losses(config.run_dir))
    assert 2 <= done < 8
    (saved,) = config.run_dir.glob("checkpoints/iter_*")
    assert saved.name == f"iter_{done:07d}"
    run_ranks(2, pretrain, config)
    assert losses(config.run_dir) == losses(whole.run_dir)


def test_the_clock_ends_a_run_too(tmp_path: Path) -> None:
    config = config_of(tmp_path, model=TINY, training={"exit_after_minutes": 1e-9})
    run_ranks(1, pretrain, config)
    assert list(losses(tmp_path)) == [1]
    assert (tmp_path / "checkpoints/iter_0000001").is_dir()


def test_what_was_being_written_when_training_failed_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(tmp_path, model=TINY, checkpoint={"asynchronous": True})
    complete = folder.complete

    def slowly(*arguments: Any) -> Path:
        time.sleep(0.5)
        return complete(*arguments)

    monkeypatch.setattr(folder, "complete", slowly)

    def fails() -> None:
        with Trainer(config) as trainer:
            trainer.initialize()
            trainer.setup_model_and_optimizer()
            trainer.train(batch_of(0, TINY["vocab_size"]))
            trainer.save()
            raise ZeroDivisionError

    def caught() -> None:
        with pytest.raises(ZeroDivisionError):
            fails()

    run_ranks(2, caught)
    assert folder.newest(tmp_path / "checkpoints").path == tmp_path / "checkpoints/iter_0000001"


def transformers_loss(path: Path, *batches: dict[str, Tensor]) -> float:
    """Return the loss per token that transformers computes."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path).eval()
    total = count = 0.0
    with torch.no_grad():
        for batch in batches:
            logits = model(batch["tokens"]).logits
            each = torch.nn.functional.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none")
            total += float((each * batch["loss_mask"]).sum())
            count += float(batch["loss_mask"].sum())
    return total / count


@pytest.mark.parametrize(("name", "parallel"), [("gpt2", {"pp": 2}), ("llama-gqa", {"tp": 2})])
def test_from_hugging_face_and_back(
    name: str, parallel: dict[str, Any], hf_checkpoint: HfMaker, tmp_path: Path
) -> None:
    """The first step's loss is that of transformers on the same batch, and so is that of the model that comes out."""
    source = hf_checkpoint(name, fill="normal")
    checkpoint = {"init": str(source), "export_hf": "end", "asynchronous": True}
    config = config_of(tmp_path, parallel={**parallel, "distributed_optimizer": True}, checkpoint=checkpoint)

    def run() -> tuple[float, float]:
        with Trainer(config) as trainer:
            trainer.initialize()
            trainer.setup_model_and_optimizer()
            vocab_size = trainer.args["vocab_size"]
            first = float(trainer.train(batch_of(0, vocab_size)).loss)
            for step in (1, 2):
                trainer.train(batch_of(step, vocab_size))
            trainer.save()
            trainer.finish()
            return first, trainer.evaluate([batch_of(3, vocab_size), batch_of(4, vocab_size)])

    answers = run_ranks(4, run)
    exported = tmp_path / "hf/iter_0000003"
    vocab_size = json.loads((source / "config.json").read_text())["vocab_size"]
    batches = [batch_of(step, vocab_size) for step in (3, 4)]
    expected = (transformers_loss(source, batch_of(0, vocab_size)), transformers_loss(exported, *batches))
    assert abs(expected[1] - transformers_loss(source, *batches)) > 1e-2
    for answer in answers:
        assert answer == pytest.approx(expected, abs=1e-5)
    assert verify(tmp_path / "checkpoints", exported).equal
    assert (exported / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "iter_0000003",
        "latest_checkpointed_iteration.txt",
    ]


def test_each_checkpoint_is_exported_with_the_tokenizer_that_it_was_trained_with(
    hf_checkpoint: HfMaker, tmp_path: Path
) -> None:
    tokenizer = hf_checkpoint("llama-gqa", fill="normal")
    config = config_of(
        tmp_path,
        model={**TINY, "position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True}
        | {"add_bias_linear": False, "untie_embeddings_and_output_weights": True, "norm_epsilon": 1e-5},
        data={"tokenizer": str(tokenizer)},
        checkpoint={"export_hf": "each", "save_interval": 4, "keep_last": 1},
    )
    run_ranks(1, pretrain, config)
    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == ["iter_0000004", "iter_0000008"]
    assert verify(tmp_path / "checkpoints", tmp_path / "hf/iter_0000008").equal
    assert not verify(tmp_path / "checkpoints", tmp_path / "hf/iter_0000004").equal
    assert (tmp_path / "hf/iter_0000004/tokenizer.json").read_bytes() == (tokenizer / "tokenizer.json").read_bytes()


def test_a_damaged_checkpoint_is_passed_over_from_the_start(tmp_path: Path) -> None:
    config = config_of(tmp_path, model=TINY, training={"steps": 4}, checkpoint={"save_interval": 2})
    run_ranks(1, pretrain, config)
    expected = losses(tmp_path)
    (tmp_path / "checkpoints/iter_0000004/.metadata").write_bytes(b"")
    run_ranks(1, pretrain, config)
    assert losses(tmp_path) == expected
    assert verify(tmp_path / "checkpoints/iter_0000004", tmp_path / "checkpoints/iter_0000004").equal
