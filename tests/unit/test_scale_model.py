"""The model of time on many machines: what was measured follows from it, and so does the table of the documentation."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks import scale
from benchmarks.scale import ALONE, RUNS, Cluster, Work, loads, predicted, processor_seconds
from mcore_convert.conversion.ranks import Ranks
from tests.kinds import ROOT

WORK = Work(10**12, 500, 40_000)


def cluster(nodes: int, processes: int = 1, *, threads: int = 2) -> Cluster:
    return Cluster(nodes, processes, threads, 5e9, 100e9)


@pytest.mark.parametrize("number", range(len(RUNS)))
def test_measured_runs_follow_from_the_costs(number: int) -> None:
    costs, run = RUNS[number]
    assert processor_seconds(run, costs) == pytest.approx(run.processor_seconds, rel=0.1)


@pytest.mark.parametrize(("files", "processes"), [(1, 1), (7, 3), (9, 2), (10, 10), (3, 8)])
def test_files_are_dealt_out_as_processes_do_it(files: int, processes: int) -> None:
    sizes = {Path(f"{number:03}"): 10 for number in range(files)}
    parts = [Ranks(rank, processes).part(sizes) for rank in range(processes)]
    assert loads(Work(10 * files, files, 1), processes) == [10 * len(part) for part in parts]


def test_more_machines_copy_no_slower_until_the_storage_is_the_limit() -> None:
    times = [predicted(WORK, ALONE, cluster(nodes)).copy for nodes in (1, 2, 4, 8, 16, 64, 500, 5000)]
    assert all(later <= sooner for sooner, later in pairwise(times))
    assert times[0] == pytest.approx(500)  # 1 GB in a second of one of two threads
    assert times[1] == pytest.approx(250)
    assert times[-1] == times[-2] == pytest.approx(2 * WORK.nbytes / 100e9)


def test_one_file_is_written_by_one_process() -> None:
    one = WORK._replace(files=1)
    assert predicted(one, ALONE, cluster(8)).copy == predicted(one, ALONE, cluster(1)).copy


def test_each_process_reads_all_headers_and_the_first_finishes_alone() -> None:
    few, many = (predicted(WORK, ALONE, cluster(nodes)) for nodes in (1, 20_000))
    assert few.plan == pytest.approx(ALONE.plan * WORK.parts)
    assert many.plan == pytest.approx(20_000 * scale.HEADER * WORK.parts / 100e9)
    assert few.finish == many.finish == pytest.approx(ALONE.finish * WORK.parts)


def test_the_documentation_has_the_table() -> None:
    assert scale.table() in (ROOT / "docs/scale.md").read_text()
