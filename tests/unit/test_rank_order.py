"""Directories of ranks that have each other's names: shapes and layers may agree, and weights would be others."""

from __future__ import annotations

import shutil
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from mcore_convert.errors import UnreadableCheckpoint
from mcore_convert.formats.mp_rank.directory import open_mp_rank
from mcore_convert.formats.mp_rank.layout import check_order, rank_name
from mcore_convert.spec.layout import Layout
from tests.kinds import ROOT

REAL = ROOT.parent / "shared/megatron_checkpoints"


def stored(layout: Layout, *, data_parallel: int = 1, **args: Any) -> dict[str, dict[str, Any]]:
    """Return the arguments of each rank as a run stores them, numbered as Megatron Core does."""
    ranks = sorted(layout.ranks(), key=lambda rank: (rank.pp, rank.ep, rank.tp))
    in_stage = len(ranks) // layout.pp
    numbers = [rank.pp * in_stage * data_parallel + number % in_stage for number, rank in enumerate(ranks)]
    return {rank_name(rank, layout): {"rank": number, **args} for rank, number in zip(ranks, numbers, strict=True)}


@pytest.mark.parametrize(
    "layout",
    [Layout(), Layout(tp=2), Layout(tp=2, pp=2), Layout(pp=2, ep=2), Layout(tp=2, ep=4, etp=1), Layout(tp=2, ep=2)],
)
@pytest.mark.parametrize("data_parallel", [1, 4])
def test_only_one_order_of_directories_is_that_of_a_run(layout: Layout, data_parallel: int) -> None:
    right = stored(layout, data_parallel=data_parallel)
    check_order(right, layout, "`run`")
    for values in list(permutations(right.values()))[1:24]:
        with pytest.raises(UnreadableCheckpoint, match="directories of other ranks"):
            check_order(dict(zip(right, values, strict=True)), layout, "`run`")


def test_runs_that_do_not_tell_are_taken_as_they_are() -> None:
    layout = Layout(pp=2)
    runs: list[dict[str, dict[str, Any]]] = [
        {"mp_rank_00_000": {}, "mp_rank_00_001": {}},
        {"mp_rank_00_000": {"rank": 0}, "mp_rank_00_001": {"rank": 0}},  # what was not written by its ranks
        {"mp_rank_00_000": {"rank": 1, "use_tp_pp_dp_mapping": True}, "mp_rank_00_001": {"rank": 0}},
    ]
    for args in runs:
        check_order(args, layout, "`run`")


@pytest.mark.skipif(not REAL.is_dir(), reason="no real checkpoints beside the repository")
@pytest.mark.parametrize(
    ("name", "one", "other"),
    [
        ("dsv3_legacy_ep2", "mp_rank_00_000", "mp_rank_00_001"),  # experts of a model, which have one shape
        ("llama_legacy_tp2pp2", "mp_rank_00_001", "mp_rank_01_001"),  # parts of matrices
    ],
)
def test_exchanged_ranks_of_a_real_run_are_refused(name: str, one: str, other: str, tmp_path: Path) -> None:
    run = Path(shutil.copytree(REAL / name, tmp_path / "run")) / "iter_0000010"
    open_mp_rank(run)
    for source, target in ((one, "x"), (other, one), ("x", other)):
        (run / source).rename(run / target)
    with pytest.raises(UnreadableCheckpoint) as caught:
        open_mp_rank(run)
    assert [line.split()[0] for line in caught.value.items] == sorted((one, other))
