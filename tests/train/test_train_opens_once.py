"""A start of training opens its source once: to learn what the model is, to convert it and to load it."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.checkpoints import make_llama
from benchmarks.ranks import make_ranks
from mcore_convert import reshard
from mcore_convert.errors import ConvertError, UnreadableCheckpoint
from mcore_convert.spec import Layout
from tests.kinds import ROOT
from tests.oracle.test_benchmarks import SMALL
from tests.ranks import run_ranks
from tests.train.test_train_layouts import config_of
from train_entry.checkpoints.source import in_our_format, source_of
from train_entry.config.schema import Config
from train_entry.trainer import Trainer

DPO = {"class": "dpo:Dpo", "beta": 0.1}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One model in two formats, that of Megatron with optimizer state."""
    folder = tmp_path_factory.mktemp("sources")
    ranks = make_ranks(folder / "torch", SMALL, Layout(tp=2))
    reshard(ranks, folder / "torch_dist", to="torch_dist", tp=2)
    return {"hf": make_llama(folder / "hf", SMALL), "torch_dist": folder / "torch_dist"}


class Headers(logging.Handler):
    """Counts the headers that are read."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.counts: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "for its header" in text:
            self.counts[text] += 1


def headers_of(config: Config, *, save: bool = False) -> Counter[str]:
    """Return how often each header is read until a run could take its first step, and after that where it saves."""
    headers, logger = Headers(), logging.getLogger("mcore_convert")
    logger.setLevel(logging.DEBUG)
    logger.addHandler(headers)
    try:
        with Trainer(config) as trainer:
            trainer.initialize()
            trainer.setup_model_and_optimizer()
            counts = Counter(headers.counts)
            if save:
                trainer.save()
    finally:
        logger.removeHandler(headers)
    return counts


def start(run_dir: Path, flow: dict[str, Any] | None = None, **checkpoint: Any) -> Config:
    training = {"flow": flow, "micro_batch_size": 2} if flow else {}
    return config_of(run_dir, training=training, checkpoint=checkpoint)


def test_a_start_parses_each_header_once(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it starts from; a reference model with the same weights, and one with others, add nothing to it."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "examples"), *sys.path])
    hf, own = str(sources["hf"]), tmp_path / "own/checkpoints"
    runs = {
        "weights": (start(tmp_path / "own", init=hf, save=True), [hf]),
        "itself with a reference": (start(tmp_path / "own", DPO, init=hf), [hf, str(own)]),
        "reference": (start(tmp_path / "dpo", DPO, init=hf), [hf]),
        "another run": (start(tmp_path / "run", load=sources["torch_dist"]), [str(sources["torch_dist"])]),
    }

    def counted() -> dict[str, Counter[str]]:
        return {name: headers_of(config, save=config.checkpoint.save) for name, (config, _) in runs.items()}

    (counts,) = run_ranks(1, counted)
    for name, (_, paths) in runs.items():
        assert all(any(f"{path}/" in text for text in counts[name]) for path in paths), name  # the count sees each
        assert {text: count for text, count in counts[name].items() if count > 1} == {}, name


def test_a_source_that_changes_after_it_was_opened_is_refused(sources: dict[str, Path], tmp_path: Path) -> None:
    """The model is built in between, which takes minutes: what is then loaded is what was checked, or nothing."""
    config = start(tmp_path / "run", load=sources["torch_dist"])
    source = source_of(config)
    assert source is not None
    metadata = next(sources["torch_dist"].rglob(".metadata"))
    metadata.touch()
    with pytest.raises(UnreadableCheckpoint, match="has changed since it was opened"):
        in_our_format(source, config)


def test_a_damaged_manifest_excludes_a_checkpoint(sources: dict[str, Path], tmp_path: Path) -> None:
    """What several checkpoints in one directory are held to is what one alone is."""
    source = sources["torch_dist"]
    manifest = next(source.rglob("mcore_convert.json"))
    manifest.write_bytes(manifest.read_bytes()[:-20])
    for path in (source, manifest.parent):
        with pytest.raises(ConvertError, match=r"mcore_convert\.json"):
            source_of(start(tmp_path / "run", init=str(path)))
