"""Companions of a model's weights: a tokenizer that fits it, and the settings of generation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mcore_convert.checkpoints.download import REPO_ID, tokenizer_path
from mcore_convert.checkpoints.identify import Model
from mcore_convert.checkpoints.runs import History
from mcore_convert.errors import ConvertError, DataError
from mcore_convert.formats.files.json_file import read_json
from mcore_convert.formats.files.model_folder import GENERATION_CONFIG
from mcore_convert.publishing.tokenizer import Tokenizer, read_gpt2_bpe, read_tokenizer
from mcore_convert.spec.config.arguments import padded_vocab_size

FORMS = "one is tokenizer.json, or vocab.json with merges.txt, or tokenizer.model, or a file of tiktoken"
# Megatron-LM's names of tokenizers whose `--tokenizer-model` is a SentencePiece file (`megatron/training/tokenizer`).
SENTENCEPIECE = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")

HINT = "pass --tokenizer DIR, or a name on the Hub; --no-tokenizer exports the model alone"


def tokenizer_of(model: Model, history: History, asked: str | None) -> Tokenizer:
    """Return the tokenizer that the user named, else that of the original model, else that of the training run.

    Raises:
        ConvertError: there is none, or its files are damaged.
    """
    if asked is not None:
        tokenizer = read_tokenizer(tokenizer_path(asked))
        if tokenizer is None:
            raise DataError(f"`{asked}` has no tokenizer", hint=FORMS)
        return tokenizer
    searched = []
    for place, tokenizer in _places(model, history):
        if tokenizer is not None:
            return tokenizer
        searched.append(place)
    raise DataError(f"there is no tokenizer for `{model.checkpoint.path}`", items=searched, hint=HINT)


def _places(model: Model, history: History) -> Iterator[tuple[str, Tokenizer | None]]:
    """Yield the places of a tokenizer: a message if there is none, and the tokenizer there."""
    if model.folder is not None:
        yield f"none in `{model.folder}`", read_tokenizer(model.folder)
    else:
        yield "none was carried along: the checkpoint has no folder `hf`", None
    named = history.tokenizer
    if named is not None:
        if Path(named).is_dir():
            yield f"none in `{named}`, which the training run names", read_tokenizer(Path(named))
        elif REPO_ID.fullmatch(named):
            try:
                folder = tokenizer_path(named)
            except ConvertError as error:
                yield f"the training run names `{named}`: {error.message}", None
            else:
                yield f"none in `{named}` on the Hub, which the training run names", read_tokenizer(folder)
        else:
            yield f"`{named}`, which the training run names, is not there", None
    stored = model.checkpoint.common.args or {}
    files = [stored.get(name) for name in ("vocab_file", "merge_file")]
    if stored.get("tokenizer_type") == "GPT2BPETokenizer" and all(isinstance(file, str) for file in files):
        vocabulary, merges = (Path(str(file)) for file in files)
        missing = f"`{vocabulary}` and `{merges}`, which the training run names, are not there"
        yield missing, read_gpt2_bpe(vocabulary, merges)
    model_file = stored.get("tokenizer_model")
    if stored.get("tokenizer_type") in SENTENCEPIECE and isinstance(model_file, str):
        yield f"`{model_file}`, which the training run names, is not there", read_tokenizer(Path(model_file))


def is_the_vocabulary(tokenizer: Tokenizer, model: Model) -> bool:
    """Return whether the embedding has Megatron's number of rows for this tokenizer, so that the others are padding."""
    tp = model.args.get("tensor_model_parallel_size") or 1
    divisible_by = model.args.get("make_vocab_size_divisible_by") or 128
    return padded_vocab_size(tokenizer.size, tp, divisible_by) == model.dims.padded_vocab_size


def check_fit(tokenizer: Tokenizer, model: Model, notes: list[str]) -> None:
    """Prove that every token has a row of the embedding, and note rows without a token.

    Raises:
        DataError: the tokenizer is larger than the vocabulary.
    """
    size, vocab, rows = tokenizer.size, model.dims.vocab_size, model.dims.padded_vocab_size
    if size > vocab:
        more = f"--vocab-size {size} keeps that many of its {rows} rows" if size <= rows else None
        raise DataError(
            f"the tokenizer has {size} tokens, and the model a vocabulary of {vocab}",
            items=[f"the tokenizer is that of `{tokenizer.place}`"],
            hint=more or "was the model trained with another tokenizer? --tokenizer names it",
        )
    if size < vocab:
        last = f"{size} to {vocab - 1}" if size < vocab - 1 else str(size)
        notes.append(f"the tokenizer has {size} tokens, and the vocabulary {vocab} rows: {last} stand for no text")


def with_token_ids(config: Mapping[str, Any], tokenizer: Tokenizer, *, replace: bool, pad: bool) -> dict[str, Any]:
    """Return a configuration with the ids of the tokens that begin and end a text, and with `pad` of the padding token.

    Args:
        replace: also replace ids that the configuration has, which belong to another tokenizer.
    """
    result = dict(config)
    for name, number in tokenizer.special.items():
        if (pad or name != "pad_token_id") and (replace or result.get(name) is None):
            result[name] = number
    return result


def generation_config(
    model: Model, config: Mapping[str, Any], tokenizer: Tokenizer | None, *, replace: bool
) -> dict[str, Any]:
    """Return the generation settings: those of the original model, or else only the ids of special tokens."""
    file = model.folder / GENERATION_CONFIG if model.folder is not None else None
    if file is not None and file.is_file():
        original = read_json(file)
        return with_token_ids(original, tokenizer, replace=True, pad=True) if tokenizer and replace else original
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    known = {name: config[name] for name in names if config.get(name) is not None}
    return known if tokenizer is None else with_token_ids(known, tokenizer, replace=False, pad=True)
