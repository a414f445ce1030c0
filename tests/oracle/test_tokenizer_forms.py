"""Tokenizers without a word about themselves: two files of GPT-2's, or one of SentencePiece; by folder or by file."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from fixtures.megatron import save_torch_dist
from fixtures.tokenizer import make_tokenizer
from mcore_convert import export
from mcore_convert.checkpoints.identify import identify
from mcore_convert.comparison.logits import tensors_of
from mcore_convert.errors import DataError
from mcore_convert.publishing.tokenizer import read_gpt2_bpe, read_tokenizer
from tests.conftest import HfMaker
from train_entry.data.tokenizer import load_tokenizer

TEXT = "Once upon a time there was a little fox."
HAS_SENTENCEPIECE = find_spec("sentencepiece") is not None


@pytest.fixture
def bpe(tmp_path: Path) -> Path:
    """`vocab.json` and `merges.txt` alone, of the tokenizer in `full`."""
    full = make_tokenizer(tmp_path / "full", 300)
    model = json.loads((full / "tokenizer.json").read_text())["model"]
    folder = tmp_path / "bpe"
    folder.mkdir()
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in model["merges"]))
    return folder


def varint(number: int) -> bytes:
    low, rest = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + varint(rest) if rest else bytes([low])


def message(*fields: tuple[int, Any]) -> bytes:
    """Return a protobuf message: numbers, and bytes with their length."""
    parts = []
    for number, value in fields:
        if isinstance(value, int):
            parts.append(varint(number << 3) + varint(value))
        else:
            parts.append(varint(number << 3 | 2) + varint(len(value)) + value)
    return b"".join(parts)


@pytest.fixture
def sentencepiece(tmp_path: Path) -> Path:
    """A SentencePiece model of 300 pieces, as its own trainer would write it."""
    control = [(b"<unk>", 2), (b"<s>", 3), (b"</s>", 3)]
    pieces = [*control, *((b"<0x%02X>" % byte, 6) for byte in range(256))]
    pieces += [(f"\u2581{chr(97 + n)}".encode() * (1 + n // 26), 1) for n in range(300 - len(pieces))]
    trainer = message((3, 2), (4, len(pieces)), (35, 1))  # BPE, the size, byte fallback
    content = [(1, message((1, piece), (3, kind))) for piece, kind in pieces]
    file = tmp_path / "llama.model"
    file.write_bytes(message(*content, (2, trainer), (3, message((1, b"identity")))))
    return file


def test_two_files_of_gpt2_are_a_tokenizer_of_their_own(bpe: Path) -> None:
    oracle = AutoTokenizer.from_pretrained(bpe.parent / "full")
    for name in (bpe, bpe / "vocab.json", bpe / "merges.txt"):
        tokenizer, loaded = read_tokenizer(name), load_tokenizer(str(name))
        assert tokenizer is not None
        assert (tokenizer.size, loaded.vocab_size) == (300, 300)
        assert tokenizer.special == {"bos_token_id": oracle.bos_token_id, "eos_token_id": oracle.eos_token_id}
        assert loaded.eod == oracle.eos_token_id
        assert loaded.hf(TEXT)["input_ids"] == oracle(TEXT)["input_ids"]
    named, whole = read_gpt2_bpe(bpe / "vocab.json", bpe / "merges.txt"), read_tokenizer(bpe)
    assert named is not None
    assert whole is not None
    assert named.texts == whole.texts


def test_a_token_that_the_vocabulary_lacks_is_not_added(bpe: Path) -> None:
    vocabulary = json.loads((bpe / "vocab.json").read_text())
    number = vocabulary.pop("<|endoftext|>")
    (bpe / "vocab.json").write_text(json.dumps({**vocabulary, "<end>": number}))
    tokenizer = read_tokenizer(bpe)
    assert tokenizer is not None
    assert (tokenizer.size, tokenizer.special) == (300, {})
    (bpe / "tokenizer_config.json").write_bytes(tokenizer.texts["tokenizer_config.json"])
    assert len(AutoTokenizer.from_pretrained(bpe)) == 300


def saved(source: Path, path: Path, **stored: Any) -> Path:
    """Return a checkpoint that Megatron saved, with these arguments of its tokenizer."""
    model = identify(source)
    args = {**model.args, "padded_vocab_size": model.dims.vocab_size, "vocab_size": None, **stored}
    save_torch_dist(args, {name: tensor.clone() for name, tensor in tensors_of(model)}, path, common="common.pt")
    return path


def test_an_export_takes_two_files_along_and_names_their_class(bpe: Path, hf_checkpoint: HfMaker) -> None:
    """Llama with GPT-2's tokenizer: by its configuration alone transformers would take Llama's own."""
    run = saved(hf_checkpoint("llama-gqa"), bpe.parent / "run", tokenizer_type=None)
    done = export(run, bpe.parent / "out", tokenizer=str(bpe))
    assert {"vocab.json", "merges.txt", "tokenizer_config.json"} <= set(done.files)
    written, oracle = (
        AutoTokenizer.from_pretrained(bpe.parent / "out"),
        AutoTokenizer.from_pretrained(bpe.parent / "full"),
    )
    assert written(TEXT)["input_ids"] == oracle(TEXT)["input_ids"]
    assert json.loads((bpe.parent / "out/config.json").read_text())["eos_token_id"] == oracle.eos_token_id


def test_an_export_takes_the_sentencepiece_model_that_the_run_names(
    sentencepiece: Path, hf_checkpoint: HfMaker
) -> None:
    stored = {"tokenizer_type": "Llama2Tokenizer", "tokenizer_model": str(sentencepiece)}
    run = saved(hf_checkpoint("llama-gqa"), sentencepiece.parent / "run", **stored)
    done = export(run, sentencepiece.parent / "out")
    assert done.tokenizer is not None
    assert (done.tokenizer.size, done.tokenizer.place) == (300, str(sentencepiece))
    out = sentencepiece.parent / "out"
    assert (out / "tokenizer.model").read_bytes() == sentencepiece.read_bytes()
    config = json.loads((out / "tokenizer_config.json").read_text())
    assert config == {
        "tokenizer_class": "LlamaTokenizer",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    if HAS_SENTENCEPIECE:
        assert len(AutoTokenizer.from_pretrained(out)) == 300


@pytest.mark.skipif(HAS_SENTENCEPIECE, reason="sentencepiece is installed")
def test_an_error_of_transformers_is_shown_whole(sentencepiece: Path) -> None:
    folder = sentencepiece.parent / "folder"
    folder.mkdir()
    (folder / "tokenizer.model").write_bytes(sentencepiece.read_bytes())
    with pytest.raises(DataError, match="no tokenizer that transformers can read") as caught:
        load_tokenizer(str(folder))
    assert any("tiktoken" in line for line in caught.value.items)
    assert "pip install sentencepiece" in str(caught.value)
    (folder / "tokenizer.model").unlink()
    (folder / "vocab.json").write_text("{}")
    with pytest.raises(DataError) as caught:
        load_tokenizer(str(folder))
    assert len(caught.value.items) > 1  # a list of what it tried, which begins with `one of:`
