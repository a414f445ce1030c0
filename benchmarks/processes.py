"""Measures two processes of one thread against one process of two, once all have started.

    python -m benchmarks.processes [--json FILE] [--rounds 3]

Both convert the same model into memory, in the processes that torchrun has started. Processor time is compared, which
other work on the machine disturbs least: what two processes spend more than two threads is what sharing costs.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.checkpoints import LLAMA, llama_nbytes, make_llama
from benchmarks.convert import MEMORY, Figure, folder, parser_of, reported, roomy, say

SLOWER = 1 / 0.95  # time of two processes, relative to two threads, that is allowed
SHARD = 300 * 10**6  # bytes per file: enough files for both


def timed(source: Path, target: Path, workers: int) -> float:
    """Return the processor seconds of this process in a conversion."""
    import mcore_convert

    before = _processor_seconds()
    mcore_convert.convert(source, target, to="torch_dist", max_shard_size=SHARD, workers=workers)
    return _processor_seconds() - before


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def run_rank(place: Path) -> None:
    """Convert on one of two ranks: once alone to warm up, on the first with two threads, then on both together."""
    from mcore_convert.conversion.ranks import joined

    rank, source = int(os.environ["RANK"]), place / "hf"
    timed(source, place / f"warm{rank}", 1)
    shutil.rmtree(place / f"warm{rank}")
    _meet(place, "warm", rank)
    threads = timed(source, place / "threads", 2) if rank == 0 else 0.0
    _meet(place, "begin", rank)
    with joined():
        shared = timed(source, place / "shared", 1)
    (place / f"result{rank}.json").write_text(json.dumps([threads, shared]))


def _meet(place: Path, name: str, rank: int) -> None:
    """Wait for the other rank, without using the processor."""
    (place / f"{name}.{rank}").touch()
    while not (place / f"{name}.{1 - rank}").exists():
        time.sleep(0.02)


def measure(rounds: int) -> list[Figure]:
    """Return all figures, in memory if there is room."""
    disk = Path(tempfile.gettempdir())
    where = roomy(4 * llama_nbytes(LLAMA), MEMORY, disk)
    if where is None:
        raise SystemExit(f"error: {4.4 * llama_nbytes(LLAMA) / 1e9:.1f} GB of room are needed in {MEMORY} or {disk}")
    threads, shared = [], []
    with folder(where) as name:
        model = make_llama(Path(name) / "hf", LLAMA)
        for number in range(rounds):
            place = Path(name) / f"round{number}"
            place.mkdir()
            (place / "hf").symlink_to(model)
            torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
            command = (sys.executable, "-m", *torchrun, "-m", "benchmarks.processes", "--rank-in", str(place))
            subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
            results = [json.loads((place / f"result{rank}.json").read_text()) for rank in range(2)]
            threads.append(results[0][0])
            shared.append(sum(each[1] for each in results))
            say(f"two threads {threads[-1]:.2f} s, two processes {shared[-1]:.2f} s")
            shutil.rmtree(place)
    median = statistics.median(threads)
    return [
        Figure("two threads, processor time", median, "s"),
        Figure("two processes, processor time", statistics.median(shared), "s", SLOWER * median),
    ]


def main() -> int:
    parser = parser_of(__doc__)
    parser.set_defaults(rounds=3)
    parser.add_argument("--rank-in", type=Path, metavar="DIR", help="be one of the two ranks, which torchrun starts")
    options = parser.parse_args()
    if options.rank_in is not None:
        run_rank(options.rank_in)
        return 0
    return reported(lambda: measure(options.rounds), options.json)


if __name__ == "__main__":
    sys.exit(main())
