"""A model of the time of a conversion on many machines, from measurements here and the assumed speeds of a cluster.

    python -m benchmarks.scale

prints a table of `docs/scale.md`. Nothing is run: files are assigned as the processes do it, and each phase takes the
time of its slowest part. `tests/unit/test_scale_model.py` compares it with measurements.
"""

from __future__ import annotations

from typing import NamedTuple

GB = 10**9
HEADER = 2048  # bytes that a plan reads per part: around a chunk in a `.distcp` file


class Work(NamedTuple):
    """Content of a conversion: bytes, target files, which are alike, and parts that tensors lie in."""

    nbytes: int
    files: int
    parts: int


class Costs(NamedTuple):
    """Seconds of one processor: until a process plans, to plan a part, to copy 1 GB with its checksums, and to finish a
    part, which only the first process does."""

    start: float
    plan: float
    copy: float
    finish: float


class Cluster(NamedTuple):
    """Machines that share a file system; the bandwidth of one of them, and that of the storage, in bytes per second.

    Threads were measured up to two; it is not known how many more one process can use.
    """

    nodes: int
    processes: int  # per machine
    threads: int  # per process
    node_speed: float
    storage_speed: float


class Phases(NamedTuple):
    """Seconds of each phase."""

    start: float
    plan: float
    copy: float
    finish: float

    @property
    def total(self) -> float:
        return sum(self)


class Run(NamedTuple):
    """Measured conversion: the seconds of all processors together."""

    work: Work
    processes: int
    processor_seconds: float


def loads(work: Work, processes: int) -> list[float]:
    """Return the bytes that each process writes: files that are alike are assigned in turn (`Ranks.part`)."""
    rounds, left = divmod(work.files, processes)
    return [work.nbytes / work.files * (rounds + (rank < left)) for rank in range(processes)]


def predicted(work: Work, costs: Costs, cluster: Cluster) -> Phases:
    """Return the seconds of a conversion if nothing else runs, and the storage has the assumed speed."""
    count = cluster.nodes * cluster.processes
    each = loads(work, count)
    on_nodes = [sum(each[first : first + cluster.processes]) for first in range(0, count, cluster.processes)]
    headers = HEADER * work.parts  # read by every process
    plan = max(
        costs.plan * work.parts,
        cluster.processes * headers / cluster.node_speed,
        count * headers / cluster.storage_speed,
    )
    copy = max(
        costs.copy * max(each) / GB / cluster.threads,
        2 * max(on_nodes) / cluster.node_speed,  # read and written
        2 * work.nbytes / cluster.storage_speed,
    )
    return Phases(costs.start, plan, copy, costs.finish * work.parts)


def processor_seconds(run: Run, costs: Costs) -> float:
    """Return the model's processor seconds for a measured conversion."""
    in_each = costs.start + costs.plan * run.work.parts
    return run.processes * in_each + costs.copy * run.work.nbytes / GB + costs.finish * run.work.parts


def table() -> str:
    """Return the rows of `docs/scale.md`: seconds on clusters of CLUSTERS."""
    lines = [
        "| what | files | parts | nodes x processes | plan | copy | finish | all |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for what, work in WORKS.items():
        for nodes, processes in ((1, 1), (1, 16), (4, 16), (1250, 8)):
            cluster = Cluster(nodes, processes, THREADS, NODE_SPEED, STORAGE_SPEED)
            phases = predicted(work, TORCHRUN if nodes * processes > 1 else ALONE, cluster)
            cells = [what, f"{work.files:,}", f"{work.parts:,}", f"{nodes:,} x {processes}"]
            cells += [f"{value:,.0f}" for value in (*phases[1:], phases.total)]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


# Fitted to RUNS, with processors that other work kept busy: an idle one takes about half.
ALONE = Costs(start=0.8, plan=170e-6, copy=1.0, finish=480e-6)
TORCHRUN = ALONE._replace(start=4.0)  # torchrun and each process import torch, only for its store
LLAMA_1B, LLAMA_3B = Work(2_471_645_608, 9, 146), Work(6_366_000_000, 23, 434)
EXPERTS = Work(2_011_000_000, 2, 9_435)
RUNS = (
    (ALONE, Run(LLAMA_1B, 1, 3.4)),
    (ALONE, Run(LLAMA_3B, 1, 7.3)),
    (TORCHRUN, Run(LLAMA_1B, 2, 11.3)),
    (ALONE, Run(EXPERTS, 1, 8.8)),
)

# Assumed, not measured: 200 Gbit/s from a machine to the storage, which moves 100 GB/s in total.
NODE_SPEED, STORAGE_SPEED, THREADS = 25e9, 100e9, 2
WORKS = {
    "405 B, bf16": Work(812 * GB, 400, 5_400),
    "671 B with experts, bf16": Work(1_370 * GB, 660, 46_183),
    "405 B with optimizer state": Work(5_680 * GB, 2_800, 21_600),
    "671 B with optimizer state, 10,000 files": Work(9_400 * GB, 10_000, 184_732),
}

if __name__ == "__main__":
    print(table())
