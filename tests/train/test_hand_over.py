"""The whole way: a model is trained, exported, generates, is pushed, and is loaded from its repository by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from transformers import pipeline

from fixtures.tokenizer import make_tokenizer, stories
from mcore_convert import export, load_hf_model, push
from tests.hub import client_of_a_hub, run_with
from tests.ranks import run_ranks
from train_entry import load_config
from train_entry.data.prepare import prepare
from train_entry.pretrain import pretrain

PROMPT = "There was a duck who"
RUN = """
defaults:
  - tiny-gpt2
  - override parallel: tp2
  - override data: indexed
  - _self_
run_dir: run
data: {paths: [stories_text_document], tokenizer: tokenizer}
training: {steps: 6, micro_batch_size: 4, seq_length: 64}
checkpoint: {save_interval: 3}
"""
LOAD = f"""
from transformers import pipeline
for revision in ("main", "iter_0000003"):
    generator = pipeline("text-generation", model="ada/stories", revision=revision)
    print(generator("{PROMPT}", max_new_tokens=8, do_sample=False)[0]["generated_text"])
"""


def test_train_export_generate_push_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the run names its files as they lie there
    train(tmp_path)
    run = tmp_path / "run"
    done = export(run)
    assert done.path == run / "hf" / "iter_0000006"
    card = ModelCard.load(done.path / "README.md").text
    assert "| iteration | 6 of 6 |" in card
    assert "| data | `stories_text_document` |" in card
    assert f"| tokens | {6 * 8 * 64:,} |" in card
    assert "| loss | " in card
    assert "| parallel layout of the source | tp 2, pp 1, on 2 ranks |" in card
    assert (done.path / "loss.png").read_bytes() == (run / "loss.png").read_bytes()
    messages = {name: story_of(str(path)) for name, path in (("main", done.path), ("iter_0000003", early(run)))}
    assert all(text.startswith(PROMPT) for text in messages.values())

    with client_of_a_hub(tmp_path) as hub:
        push(done.path, "stories", private=True)
        push(early(run), "stories", branch="iter_0000003")
        loaded = run_with(hub, tmp_path / "home", "-c", LOAD)
    assert loaded.returncode == 0, loaded.stderr
    assert loaded.stdout == "".join(f"{text}\n" for text in messages.values())
    assert load_hf_model(run).num_parameters() == done.plan.num_parameters


def train(folder: Path) -> None:
    """Run six steps on the bundled stories, on two ranks."""
    (folder / "stories.jsonl").write_text("".join(f"{json.dumps({'text': story})}\n" for story in stories()))
    (folder / "tokenizer").mkdir()
    make_tokenizer(folder / "tokenizer", 500)
    (folder / "run.yaml").write_text(RUN)
    prepare(["stories.jsonl"], "stories", tokenizer="tokenizer", workers=1)
    run_ranks(2, pretrain, load_config("run.yaml"))


def early(run: Path) -> Path:
    """Return the export of an earlier iteration."""
    path = run / "hf" / "iter_0000003"
    if not path.exists():
        export(run / "checkpoints" / "iter_0000003")
    return path


def story_of(path: str) -> str:
    generator = pipeline("text-generation", model=path)
    text: str = generator(PROMPT, max_new_tokens=8, do_sample=False)[0]["generated_text"]
    return text
