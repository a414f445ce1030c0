"""Fixtures of several files about data: a tokenizer, and prepared texts."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from fixtures.tokenizer import make_tokenizer, stories
from mcore_convert.megatron.cpu import import_megatron
from train_entry.data.prepare import prepare
from train_entry.data.tokenizer import Tokenizer, load_tokenizer

import_megatron()  # as for the tests beside these, which compare with Megatron Core
importlib.import_module("omegaconf.resolvers")  # once here, and not on each rank of a run

VOCABULARY, LENGTH, SEED = 400, 32, 1234


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tiny", VOCABULARY)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(str(folder))


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> tuple[str, str]:
    """Two pairs: all stories, and three of them."""
    path = tmp_path_factory.mktemp("corpora")
    made: list[str] = []
    for name, texts in {"all": stories(), "few": stories()[5:8]}.items():
        (path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        made += prepare([f"{path}/{name}.jsonl"], f"{path}/{name}", tokenizer=str(folder), workers=1).pairs
    return made[0], made[1]
