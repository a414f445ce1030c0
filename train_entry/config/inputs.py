"""Checks of a run's inputs: data, start and directory exist, and no two of them contradict each other."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from mcore_convert.storage.paths import near_miss
from mcore_convert.text.names import meant
from train_entry.config.schema import Config, Data

SPLIT = re.compile(r"\d+(\.\d+)?(,\d+(\.\d+)?){0,2}")
TRACKER = "latest_checkpointed_iteration.txt"
NEEDED = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")


def goes_on(config: Config) -> bool:
    """Return whether the run has checkpoints of its own to resume from: its original start may then be gone."""
    return config.checkpoint.resume and (config.run_dir / "checkpoints" / TRACKER).is_file()


def has_start(config: Config) -> bool:
    """Return whether a checkpoint defines the model: one to start from, or the run's own."""
    return bool(config.checkpoint.init or config.checkpoint.load or goes_on(config))


def problems_of_data(config: Config) -> Iterator[str]:
    """Yield the problems of the training data."""
    data, named = config.data, _named(config.data)
    if data.dataset:  # the meaning of its paths is left to the class
        return
    if data.kind == "mock" and any(named.values()):
        first = next(name for name, paths in named.items() if paths)
        yield f"`data.{first}` names data and `data.kind` = mock makes them up: choose `data=indexed` or `data=sft`"
        return
    if data.kind != "mock" and not data.paths and not data.train_paths:
        prepared = "`mcore-convert data prepare` makes them" if data.kind == "indexed" else "JSONL files"
        yield f"`data.paths` names no data ({prepared}); `data=mock` trains on made-up ones"
    if data.paths and data.train_paths:
        yield "`data.paths` is split by `data.split`, `data.train_paths` stands instead of it: give one of them"
    if (data.valid_paths or data.test_paths) and not data.train_paths:
        yield "`data.valid_paths` and `data.test_paths` go with `data.train_paths`, not with `data.paths`"
    trained_on = data.paths or data.train_paths
    if data.weights and len(data.weights) != len(trained_on):
        yield f"`data.weights` has {len(data.weights)} weights for {len(trained_on)} paths: one for each, or none"
    yield from _problems_of_split(config)
    for name, paths in named.items():
        for path in paths:
            yield from _problems_of_path(name, path, data)
    if data.kind == "sft" and data.tokenizer is None and not has_start(config):
        yield "`data.tokenizer` is not given, and there is no checkpoint to take it from: texts need one"
    if data.kind != "indexed":
        for name in ("reset_position_ids", "eod_mask_loss"):
            if getattr(data, name):
                yield f"`data.{name}` is for documents in indexed data; `data.kind` = {data.kind} has none"


def problems_of_start(config: Config) -> Iterator[str]:
    """Yield the problems of the start of training, and of the run's directory."""
    checkpoint, model = config.checkpoint, config.model
    if checkpoint.init is not None and checkpoint.load is not None:
        yield "`checkpoint.init` starts a new run and `checkpoint.load` goes on with one: give one of them"
    if not goes_on(config):
        if checkpoint.init is not None and not Path(checkpoint.init).exists() and _is_path(checkpoint.init):
            yield f"`checkpoint.init` = {checkpoint.init} does not exist{meant(near_miss(Path(checkpoint.init)))}"
        if checkpoint.load is not None and not checkpoint.load.exists():
            yield f"`checkpoint.load` = {checkpoint.load} does not exist{meant(near_miss(checkpoint.load))}"
    if checkpoint.revision is not None and checkpoint.init is None:
        yield "`checkpoint.revision` is that of a Hub id in `checkpoint.init`, and there is none"
    missing = [f"`model.{name}`" for name in NEEDED if getattr(model, name) is None]
    if model.vocab_size is None and model.default_vocab_size is None and config.data.tokenizer is None:
        missing.append("`model.vocab_size` (or `data.tokenizer`)")
    if missing and not has_start(config):
        yield (
            f"the model is not described: {', '.join(missing)}; choose one (`model=tiny-gpt2`), or a checkpoint to "
            "start from (`checkpoint.init=PATH`)"
        )
    yield from _problems_of_run_dir(config.run_dir)


def _named(data: Data) -> dict[str, tuple[str, ...]]:
    return {name: getattr(data, name) for name in ("paths", "train_paths", "valid_paths", "test_paths")}


def _problems_of_split(config: Config) -> Iterator[str]:
    split, training = config.data.split, config.training
    if not SPLIT.fullmatch(split.replace(" ", "")):
        yield f"`data.split` = {split} is not three shares, of train, valid and test: write 969,30,1"
        return
    shares = [*map(float, split.split(",")), 0.0, 0.0][:3]
    if config.data.train_paths:
        without_valid = not config.data.valid_paths
    else:
        without_valid = shares[1] == 0 and config.data.kind != "mock"
        if shares[0] == 0 and config.data.kind != "mock":
            yield f"`data.split` = {split} leaves nothing to train on: its first share is 0"
    if training.eval_steps and without_valid:
        where = "`data.valid_paths` is empty" if config.data.train_paths else f"`data.split` = {split} has no share"
        yield f"`training.eval_steps` = {training.eval_steps} wants data to evaluate on, and {where} for them"


def _problems_of_path(name: str, path: str, data: Data) -> Iterator[str]:
    if data.kind == "sft":
        if not Path(path).exists():
            yield f"`data.{name}`: `{path}` does not exist{meant(near_miss(Path(path)))}"
        return
    missing = [f"`{path}{ending}`" for ending in (".bin", ".idx") if not Path(path + ending).is_file()]
    if missing and path.endswith((".bin", ".idx")):
        yield f"`data.{name}`: `{path}` is written without its ending: `{path[:-4]}`"
    elif missing:
        there = "do not exist" if len(missing) > 1 else "does not exist"
        near = near_miss(Path(f"{path}.idx"))
        yield f"`data.{name}`: {' and '.join(missing)} {there}{meant(near and near.with_suffix(''))}"


def _problems_of_run_dir(path: Path) -> Iterator[str]:
    nearest = next(each for each in (path, *path.absolute().parents) if _exists(each))
    if not nearest.is_dir():
        yield f"`run_dir` = {path} cannot be made: `{nearest}` is a file"
    elif not os.access(nearest, os.W_OK | os.X_OK):
        yield f"`run_dir` = {path} cannot be written: no permission for `{nearest}`"


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # in a directory that may not be read
        return False


def _is_path(name: str) -> bool:
    """Return whether a name can only be a path: a Hub id has at most one slash, and no dot or slash in front."""
    return name.startswith((".", "/")) or name.count("/") > 1
