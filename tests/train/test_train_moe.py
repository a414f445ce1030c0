"""A Qwen3-MoE from Hugging Face is trained over tensor and expert ranks, exported as the same family, and generates."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import pipeline

from mcore_convert import verify
from mcore_convert.checkpoints.identify import identify
from mcore_convert.checkpoints.weights import find_weights
from mcore_convert.comparison.logits import run as logits_of
from tests.conftest import HfMaker
from tests.ranks import run_ranks
from tests.tensors import hf_tensors
from train_entry import load_config
from train_entry.pretrain import pretrain

PROMPT = "Once upon a time"
FEW_STEPS = [
    "data=mock",
    "training=cpu",
    "training.steps=2",
    "training.seq_length=16",
    "training.global_batch_size=2",
    "schedule.warmup_steps=1",
    "logging=bare",
    "optimizer.lr=0.01",
]


def test_the_ready_configuration_trains_and_exports(hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    """Dense layers among those with experts, TP 2 and EP 2, the experts not cut."""
    source = hf_checkpoint("qwen3_moe-dense-layers", fill="normal")
    run = tmp_path / "run"
    config = load_config("qwen3-moe", [f"checkpoint.init={source}", f"run_dir={run}", *FEW_STEPS])
    run_ranks(2, pretrain, config)
    exported = run / "hf/iter_0000002"
    assert verify(run / "checkpoints", exported).equal
    before, after = hf_tensors(source), hf_tensors(exported)
    assert sorted(before) == sorted(after)
    moved = "model.layers.1.mlp.gate.weight"
    assert not before[moved].equal(after[moved].to(before[moved].dtype))
    generate = pipeline("text-generation", model=str(exported), dtype=torch.float32, device="cpu")
    tokens = generate.tokenizer(PROMPT, return_tensors="pt").input_ids
    greedy = {"max_new_tokens": 5, "do_sample": False, "return_tensors": True, "eos_token_id": None}
    (answer,) = generate(PROMPT, **greedy)
    assert answer["generated_token_ids"] == chosen_by_megatron(run / "checkpoints", tokens, 5)


def chosen_by_megatron(checkpoint: Path, tokens: torch.Tensor, count: int) -> list[int]:
    """Return the tokens and those that follow them, each the likeliest to Megatron Core's own model."""
    model = identify(checkpoint)
    sources = find_weights(model.family, model.dims, model.checkpoint)
    for _ in range(count):
        tokens = torch.cat([tokens, logits_of(model, sources, tokens)[:, -1:].argmax(-1)], 1)
    result: list[int] = tokens[0].tolist()
    return result
