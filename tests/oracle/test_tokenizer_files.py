"""Tokenizers read as files: as many tokens, and the same special ones, as transformers finds in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from fixtures.tokenizer import make_tokenizer
from mcore_convert.errors import UnreadableCheckpoint
from mcore_convert.publishing.tokenizer import read_gpt2_bpe, read_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tokenizer(tmp_path, 300)


def change(folder: Path, **values: Any) -> None:
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def as_transformers_has_it(folder: Path) -> None:
    """Compare with the oracle."""
    wanted, actual = AutoTokenizer.from_pretrained(folder), read_tokenizer(folder)
    assert actual is not None
    assert actual.size == max(wanted.get_vocab().values()) + 1
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    assert actual.special == {name: getattr(wanted, name) for name in names if getattr(wanted, name) is not None}
    assert actual.has_chat_template == (wanted.chat_template is not None)


def test_a_fast_tokenizer(folder: Path) -> None:
    as_transformers_has_it(folder)
    tokenizer = read_tokenizer(folder)
    assert tokenizer is not None
    assert set(tokenizer.files) == {path.name for path in folder.iterdir()}


def test_a_special_token_that_the_vocabulary_lacks_comes_behind_it(folder: Path) -> None:
    change(folder, pad_token="[PAD]", extra_special_tokens=["<|user|>", "<|tool|>"])
    as_transformers_has_it(folder)
    tokenizer = read_tokenizer(folder)
    assert tokenizer is not None
    assert tokenizer.size == 302


def test_no_special_tokens_and_no_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    change(folder, bos_token=None, eos_token=None, pad_token=None)
    as_transformers_has_it(folder)


def test_a_vocabulary_and_merges(folder: Path) -> None:
    """The first form of GPT-2's tokenizer, as Megatron-LM names it too."""
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    for file in folder.iterdir():
        file.unlink()
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("\n".join(" ".join(pair) for pair in model["merges"]))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    as_transformers_has_it(folder)
    alone, together = read_gpt2_bpe(folder / "vocab.json", folder / "merges.txt"), read_tokenizer(folder)
    assert alone is not None
    assert together is not None
    assert (alone.size, alone.special) == (together.size, together.special)
    assert {**alone.files, **alone.texts}.keys() == together.files.keys()
    assert read_gpt2_bpe(folder / "vocab.json", folder / "none.txt") is None


def test_sentencepiece_and_tiktoken_are_counted(tmp_path: Path) -> None:
    from transformers.utils import sentencepiece_model_pb2_new as messages

    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁a", "b" * 200]
    proto = messages.ModelProto(pieces=[messages.ModelProto.SentencePiece(piece=p, score=-1.5, type=1) for p in pieces])
    proto.trainer_spec.vocab_size = len(pieces)
    (tmp_path / "tokenizer.model").write_bytes(proto.SerializeToString())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    tokenizer = read_tokenizer(tmp_path)
    assert tokenizer is not None
    assert (tokenizer.size, tokenizer.special) == (261, {"bos_token_id": 1, "eos_token_id": 2})

    (tmp_path / "tokenizer.model").write_text("IQ== 0\nIg== 1\n4Q== 2\n")
    tokens = {"3": {"content": "<|begin_of_text|>"}, "4": {"content": "<|end_of_text|>"}}
    config = {"added_tokens_decoder": tokens, "bos_token": "<|begin_of_text|>", "eos_token": {"content": "!"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = read_tokenizer(tmp_path)
    assert tokenizer is not None
    assert (tokenizer.size, tokenizer.special) == (5, {"bos_token_id": 3, "eos_token_id": 0})


def test_what_is_none_and_what_is_damaged(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    assert read_tokenizer(tmp_path / "elsewhere") is None
    assert read_tokenizer(tmp_path / "nowhere") is None
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(UnreadableCheckpoint, match="cannot be read"):
        read_tokenizer(folder)
    (folder / "tokenizer.json").unlink()
    assert read_tokenizer(folder) is None  # a configuration alone is no tokenizer
    (folder / "tokenizer.model").write_bytes(b"\n\xff\xff\xff\xff")
    with pytest.raises(UnreadableCheckpoint, match="cannot be read"):
        read_tokenizer(folder)
