"""Measures resharding of a checkpoint with optimizer state against `cp` and `import torch`, and its memory.

    python -m benchmarks.reshard [--json FILE] [--rounds 5]

Exits with 1 when a target of `benchmarks/README.md` is missed.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.convert import (
    COMMAND,
    CP_RATIO,
    IMPORT_TORCH,
    MEMORY,
    PEAK_MIB,
    Figure,
    copy,
    folder,
    parser_of,
    reported,
    roomy,
    say,
    timed,
)
from benchmarks.measure import Command, peak_anonymous_bytes, seconds
from benchmarks.ranks import QUARTER, make_ranks
from mcore_convert.spec.layout import Layout

NEEDED = 11 * 10**9  # bytes: the source, and one copy at a time
WHAT = "torch TP2 PP2 -> TP1 PP1"


def reshard(source: Path, target: Path) -> Command:
    return (*COMMAND, "reshard", source, target, "--tp", "1", "--pp", "1")


def measure(rounds: int) -> list[Figure]:
    """Return all figures. The commands of a round alternate, so that drift of the machine hits all."""
    disk = Path(tempfile.gettempdir())
    place = roomy(NEEDED, MEMORY, disk)
    if place is None:
        raise SystemExit(f"error: {1.1 * NEEDED / 1e9:.0f} GB of room are needed in {MEMORY} or {disk}")
    with folder(place) as name:
        source, target = make_ranks(Path(name) / "source", QUARTER, Layout(tp=2, pp=2)), Path(name) / "target"
        nbytes = sum(file.stat().st_size for file in source.rglob("*.pt"))
        say(f"{nbytes / 1e9:.2f} GB of weights and optimizer state, in {place}, medians of {rounds} rounds")
        peak = peak_anonymous_bytes(reshard(source, target)) / 2**20
        shutil.rmtree(target)
        times: dict[str, list[float]] = {}
        timed(copy(source, target), target)  # warms up, as the run before did
        for _ in range(rounds):
            times.setdefault("import", []).append(seconds(IMPORT_TORCH))
            times.setdefault("cp", []).append(timed(copy(source, target), target))
            times.setdefault("reshard", []).append(timed(reshard(source, target), target))
    median = {what: statistics.median(values) for what, values in times.items()}
    limit = CP_RATIO * median["cp"] + median["import"]
    return [
        Figure("import torch", median["import"], "s"),
        Figure(f"cp, the bytes of {WHAT}", median["cp"], "s"),
        Figure(WHAT, median["reshard"], "s", limit, f"{median['reshard'] / median['cp']:.2f} x cp"),
        Figure(f"peak memory, {WHAT}", peak, "MiB", PEAK_MIB),
    ]


def main() -> int:
    parser = parser_of(__doc__)
    options = parser.parse_args()
    return reported(lambda: measure(options.rounds), options.json)


if __name__ == "__main__":
    sys.exit(main())
