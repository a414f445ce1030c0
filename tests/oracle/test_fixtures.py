"""The fixtures are what they say: the same bytes on every run, readable by transformers, every row its own."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from fixtures.hf import CONFIGS, VARIANTS, FileFormat, make_hf
from fixtures.tokenizer import stories
from tests.kinds import ROOT


def digests(path: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(path.iterdir())}


def load(path: Path) -> Any:
    """Return the model as transformers reads it, with no key missing or left over."""
    model, info = AutoModelForCausalLM.from_pretrained(path, dtype="auto", output_loading_info=True)
    assert not any(info.values()), info
    return model


def same_weights(left: torch.nn.Module, right: torch.nn.Module) -> bool:
    states = left.state_dict(), right.state_dict()
    return states[0].keys() == states[1].keys() and all(
        torch.equal(states[0][key], states[1][key]) for key in states[0]
    )


@pytest.mark.parametrize("name", VARIANTS)
def test_transformers_reads_every_variant(name: str, tmp_path: Path) -> None:
    stored = json.loads((CONFIGS / f"{name}.json").read_text())
    # layers that predict further tokens are read into a model of their own, and saved by none
    path = make_hf(
        name,
        tmp_path,
        config={key: 0 for key in ("num_nextn_predict_layers", "mtp_num_hidden_layers") if key in stored},
    )
    model = load(path)
    saved = load_file(path / "model.safetensors")
    model.save_pretrained(tmp_path / "again")  # in the names of files, which are not those of modules in all families
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert all(torch.equal(tensor, again[key]) for key, tensor in saved.items())
    assert again.keys() == saved.keys()
    config = json.loads((path / "config.json").read_text())
    assert config["vocab_size"] % 128, "the vocabulary must need padding"
    assert len(AutoTokenizer.from_pretrained(path)) == config["vocab_size"]


def test_two_processes_write_equal_bytes(tmp_path: Path) -> None:
    """This one, and one in which sets have another order."""
    code = "import sys; from pathlib import Path; from fixtures.hf import make_hf\n"
    code += "for fill in ('integers', 'normal'): make_hf('llama-gqa', Path(sys.argv[1]) / fill, fill=fill)"
    environ = {**os.environ, "PYTHONHASHSEED": "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "other")], cwd=ROOT, env=environ, check=True)
    for fill in ("integers", "normal"):
        assert digests(tmp_path / "other" / fill) == digests(make_hf("llama-gqa", tmp_path / fill, fill=fill))


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa"])
def test_integers_are_distinct_through_the_whole_model(name: str, tmp_path: Path) -> None:
    saved = load_file(make_hf(name, tmp_path, tokenizer=False) / "model.safetensors")
    values = torch.cat([tensor.flatten() for tensor in saved.values()])
    assert torch.equal(values, values.round())
    assert values.unique().numel() == values.numel()
    assert values.count_nonzero() == values.numel(), "zero is what padding holds"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["gpt2", "llama-gqa"])
def test_rows_are_distinct_in_half_precision(name: str, dtype: str, tmp_path: Path) -> None:
    saved = load_file(make_hf(name, tmp_path, dtype=dtype, tokenizer=False) / "model.safetensors")
    for key, tensor in saved.items():
        assert tensor.dtype == getattr(torch, dtype)
        assert tensor.unique(dim=0).shape == tensor.shape, key


def test_seeds_differ(tmp_path: Path) -> None:
    files = [make_hf("llama-gqa", tmp_path / str(seed), seed=seed) / "model.safetensors" for seed in (0, 1)]
    assert files[0].read_bytes() != files[1].read_bytes()


def test_normal_values_give_usual_logits(tmp_path: Path) -> None:
    model = load(make_hf("llama-gqa", tmp_path, fill="normal"))
    logits = model(torch.arange(100).view(1, -1)).logits
    assert 0.1 < logits.std() < 10


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("file_format", ["safetensors", "bin", "bin_legacy"])
@pytest.mark.parametrize("name", ["gpt2", "llama-tied"])
def test_every_way_to_store_holds_the_same_model(
    name: str, file_format: FileFormat, shards: int, tmp_path: Path
) -> None:
    plain = load(make_hf(name, tmp_path / "plain"))
    path = make_hf(name, tmp_path / "stored", file_format=file_format, shards=shards, tied_head=True)
    suffix = "safetensors" if file_format == "safetensors" else "bin"
    assert len(list(path.glob(f"*.{suffix}"))) == shards
    assert len(list(path.glob("*.index.json"))) == (shards > 1)
    assert same_weights(plain, load(path))


def test_gpt2_of_the_first_release(tmp_path: Path) -> None:
    plain = load(make_hf("gpt2", tmp_path / "plain"))
    path = make_hf("gpt2", tmp_path / "old", prefix=False)
    keys = load_file(path / "model.safetensors").keys()
    assert {"wte.weight", "h.0.attn.bias", "h.0.attn.c_attn.bias"} <= keys
    assert not any(key.startswith("transformer.") for key in keys)
    assert same_weights(plain, load(path))


def test_masks_of_later_releases(tmp_path: Path) -> None:
    saved = load_file(make_hf("gpt2", tmp_path, mask_buffers=True) / "model.safetensors")
    assert saved["transformer.h.3.attn.bias"].dtype == torch.bool
    assert saved["transformer.h.3.attn.masked_bias"] == -1e4


def test_o_proj_bias_is_zero(tmp_path: Path) -> None:
    saved = load_file(make_hf("llama-attention-bias", tmp_path) / "model.safetensors")
    assert not saved["model.layers.0.self_attn.o_proj.bias"].any()
    assert saved["model.layers.0.self_attn.q_proj.bias"].all()


def test_the_old_spelling_of_a_config_stays(tmp_path: Path) -> None:
    config = json.loads((make_hf("llama3-rope-flat", tmp_path, dtype="bfloat16") / "config.json").read_text())
    assert config["torch_dtype"] == "bfloat16"
    assert config["rope_scaling"]["rope_type"] == "llama3"
    assert "rope_parameters" not in config
    assert "rope_theta" not in config["rope_scaling"]


def test_config_fields_can_be_overridden(tmp_path: Path) -> None:
    path = make_hf("llama-gqa", tmp_path, config={"num_hidden_layers": 1})
    assert json.loads((path / "config.json").read_text())["num_hidden_layers"] == 1
    assert "model.layers.1.input_layernorm.weight" not in load_file(path / "model.safetensors")


def test_tokenizer_gives_back_any_text(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(make_hf("llama-gqa", tmp_path))
    texts = ["Once upon a time, two  spaces", "caf\u00e9 \u4f60\u597d", *stories()[:3]]
    assert [tokenizer.decode(tokenizer(text).input_ids) for text in texts] == texts
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|user|>Hi<|endoftext|><|assistant|>"
