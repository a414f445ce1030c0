"""Splits: the files, and the documents in them, that a run trains, validates and tests with."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mcore_convert.errors import DataError, counted
from train_entry.config.schema import Data

NAMES = ("train", "valid", "test")


@dataclass(frozen=True)
class Blend:
    """Files of a split, and their weights; None: by size."""

    paths: tuple[str, ...]
    weights: tuple[float, ...] | None = None


def blends_of(data: Data) -> Blend | tuple[Blend | None, ...]:
    """Return one blend that all splits share, or one per split that has files.

    Raises:
        DataError: no files are named, or there are not as many weights as paths.
    """
    own = (data.train_paths, data.valid_paths, data.test_paths)
    if data.paths and any(own):
        raise DataError(
            "`data.paths` is given, and so are paths for one split",
            hint="`data.paths` goes with `data.split`, and without `train_paths`, `valid_paths` and `test_paths`",
        )
    drawn = data.paths or data.train_paths
    if not drawn:
        raise DataError(f"no data to train on: `data.kind` = `{data.kind}` needs `data.paths` or `data.train_paths`")
    if data.weights and len(data.weights) != len(drawn):
        raise DataError(f"`data.weights` has {len(data.weights)} values for {len(drawn)} paths")
    weights = data.weights or None
    if data.paths:
        return Blend(data.paths, weights)
    train, valid, test = (Blend(paths) if paths else None for paths in own)
    return (Blend(data.train_paths, weights) if train else None, valid, test)


def bounds_of(split: str) -> list[tuple[float, float] | None]:
    """Return the bounds of each split's share of the documents, as Megatron Core computes it; None if empty.

    Raises:
        DataError: it is not one to three numbers with a sum above zero.
    """
    from megatron.core.datasets.blended_megatron_dataset_config import (
        convert_split_vector_to_split_matrix,
        parse_and_normalize_split,
    )

    share = r"\s*(\d+\.?\d*|\.\d+)\s*"
    if not re.fullmatch(f"{share}(,{share}){{0,2}}", split) or not re.search("[1-9]", split):
        raise DataError(f"`data.split` = `{split}` is no split", hint="write shares of train, valid and test: 969,30,1")
    bounds: list[tuple[float, float] | None] = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
    return bounds


def slice_of(bounds: tuple[float, float] | None, documents: int) -> slice:
    """Return the slice of a file's documents within these bounds, rounded as Megatron Core does."""
    return slice(0) if bounds is None else slice(*(round(bound * float(documents)) for bound in bounds))


def check_split(
    split: int, blend: Blend, lengths: Sequence[npt.NDArray[Any]], bounds: tuple[float, float] | None, notes: list[str]
) -> bool:
    """Return whether each file has documents in a requested split: Megatron Core would search for some forever.

    A test split may be empty, as that of a small file is by the usual shares; `notes` records it.

    Args:
        lengths: numbers of tokens of the documents of each path.

    Raises:
        DataError: there is nothing to train with, or to validate with.
    """
    empty = [
        f"`{path}` has {counted(len(each), 'document', 'documents')}"
        for path, each in zip(blend.paths, lengths, strict=True)
        if not np.any(each[slice_of(bounds, len(each))])
    ]
    name = NAMES[split]
    if not empty:
        return True
    if name == "test":
        notes.append(f"no documents are left to test with: {', '.join(empty)}")
        return False
    raise DataError(
        f"no documents are left to {'train' if name == 'train' else 'validate'} with",
        items=empty,
        hint=f"change `data.split`, or name files of their own in `data.{name}_paths`"
        + ("" if name == "train" else "; `training.eval_steps=0` does without"),
    )
