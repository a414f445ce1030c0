"""The directory of a training run: its checkpoints, and its records of the training.

RUN/checkpoints/iter_*     with config.yaml, metrics.jsonl and loss.png in RUN, as the training entry here leaves it
SAVE/iter_*                as Megatron-LM's `--save` does; both with a tracker file beside the iterations
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_convert.checkpoints.metrics import METRICS, read_rows
from mcore_convert.errors import UnreadableCheckpoint
from mcore_convert.formats.base import Common
from mcore_convert.formats.megatron.run_directory import TRACKER, iteration_of, iterations, parse_tracker

CHECKPOINTS = "checkpoints"
CONFIG, PICTURE = "config.yaml", "loss.png"
OURS = "train_entry"  # the key under which the training entry keeps its own in a checkpoint's common state
WRITTEN_TRIES, WRITTEN_SECONDS = 20, 0.05  # retries while a tracker file is being written


@dataclass(frozen=True)
class Run:
    """The directory of a run, and the one within it that holds the iterations; for Megatron-LM they are the same."""

    path: Path
    checkpoints: Path

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def picture(self) -> Path | None:
        """Plot of the loss curve, if there is one."""
        file = self.path / PICTURE
        return file if file.is_file() else None

    def latest(self) -> int | None:
        """Return the iteration that the tracker file names; None if there is no tracker, or it names a release.

        Raises:
            UnreadableCheckpoint: its content is neither.
        """
        tracker = self.checkpoints / TRACKER
        name = ""
        for _ in range(WRITTEN_TRIES):  # Megatron-LM empties the file before it writes
            try:
                name = parse_tracker(tracker)
            except FileNotFoundError:
                return None
            if name:
                break
            time.sleep(WRITTEN_SECONDS)
        if not name:
            raise UnreadableCheckpoint(f"`{tracker}` says ``, which is neither an iteration nor `release`")
        return iteration_of(Path(name))

    def iterations(self) -> dict[int, Path]:
        """Return the complete checkpoints by iteration: none after the one that the tracker names."""
        latest = self.latest()
        paths = {number: path for path in iterations(self.checkpoints) if (number := iteration_of(path)) is not None}
        return {number: paths[number] for number in sorted(paths) if latest is None or number <= latest}

    def loss_at(self, iteration: int) -> Mapping[str, float]:
        """Return the last loss of a step (`train`) and of each evaluation up to an iteration;
        empty if none is known.

        A skipped step changed nothing, so its loss does not count.
        """
        losses: dict[str, float] = {}
        file = self.path / METRICS
        for _, row in read_rows(file) if file.is_file() else ():
            known = isinstance(row.get("loss"), int | float) and not row.get("skipped")
            if row["iteration"] <= iteration and known:
                losses[str(row.get("evaluation", "train"))] = float(row["loss"])
        return losses


def find_run(path: Path) -> Run | None:
    """Return the run in a directory, with the iterations in it or in `checkpoints`; None if it holds none."""
    for checkpoints in (path, path / CHECKPOINTS):
        if (checkpoints / TRACKER).is_file() or any(iteration_of(each) is not None for each in iterations(checkpoints)):
            return Run(path, checkpoints) if checkpoints != path else _run_of(path)
    return None


def run_around(checkpoint: Path) -> Run | None:
    """Return the run that the directory of an iteration belongs to; None if it belongs to none."""
    checkpoint = checkpoint if checkpoint.name else checkpoint.resolve()
    return _run_of(checkpoint.parent) if iteration_of(checkpoint) is not None else None


def _run_of(checkpoints: Path) -> Run:
    above = checkpoints.absolute().parent if checkpoints.name in ("", "..") else checkpoints.parent
    signs = (CONFIG, METRICS, PICTURE)
    if checkpoints.absolute().name == CHECKPOINTS and any((above / sign).is_file() for sign in signs):
        return Run(above, checkpoints)
    return Run(checkpoints, checkpoints)


@dataclass(frozen=True)
class History:
    """The training that led to a checkpoint, as recorded in it; None or empty where nothing is recorded.

    `data` are the names of the datasets with their weights in the blend. `tokenizer` and `base_model` are as given
    to the run: a path, or a name on the Hub.
    """

    iteration: int | None = None
    last_iteration: int | None = None
    tokens: int | None = None
    batch: tuple[int, int] | None = None
    data: tuple[tuple[str, float | None], ...] = ()
    tokenizer: str | None = None
    base_model: str | None = None


def history_of(common: Common) -> History:
    """Return the history that the common state of a checkpoint records: in Megatron-LM's arguments,
    and in the training entry's configuration.
    """
    args = common.args or {}
    config = _config_of(common)
    data, checkpoint = _dict(config, "data"), _dict(config, "checkpoint")
    length, size = _count(args, "seq_length"), _count(args, "global_batch_size")
    samples = _count(args, "consumed_train_samples")
    named = args.get("tokenizer_model") if args.get("tokenizer_type") == "HuggingFaceTokenizer" else None
    tokenizer = data.get("tokenizer") or named
    base = checkpoint.get("init")
    return History(
        common.iteration or None,
        _count(args, "train_iters"),
        samples * length if samples and length else None,
        (size, length) if size and length else None,
        tuple(_data(data, args)),
        tokenizer if isinstance(tokenizer, str) else None,
        base if isinstance(base, str) else None,
    )


def _config_of(common: Common) -> Mapping[str, Any]:
    text = _dict(common.state, OURS).get("config")
    try:
        config = json.loads(text) if isinstance(text, str) else {}
    except ValueError:
        return {}
    return config if isinstance(config, dict) else {}


def _data(config: Mapping[str, Any], args: Mapping[str, Any]) -> Iterator[tuple[str, float | None]]:
    """Yield the last component of each path, without the machine's directories, and its weight."""
    paths = config.get("train_paths") or config.get("paths")
    if paths:
        weights = config.get("weights") or [None] * len(paths)
    elif config.get("kind") == "mock":
        paths, weights = ["mock data"], [None]
    else:
        given = args.get("train_data_path") or args.get("data_path")
        words = [str(word) for word in given] if isinstance(given, list | tuple) else []
        if len(words) > 1 and len(words) % 2 == 0 and all(map(_is_number, words[::2])):  # WEIGHT PATH WEIGHT PATH
            paths, weights = words[1::2], [float(word) for word in words[::2]]
        else:
            paths, weights = words, [None] * len(words)
    for path, weight in zip(paths, weights, strict=False):
        yield Path(str(path)).name, weight


def _is_number(word: str) -> bool:
    return re.fullmatch(r"\d*\.?\d+(e-?\d+)?", word) is not None


def _count(args: Mapping[str, Any], name: str) -> int | None:
    value = args.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _dict(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = values.get(name)
    return value if isinstance(value, dict) else {}
