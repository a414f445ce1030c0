"""Measures conversion against `cp` and `import torch`, its memory, and the commands that must be instant.

    python -m benchmarks.convert [--json FILE] [--rounds 5] [--layers 16] [--skip deep] [--skip disk]

Exits with 1 when a target of `benchmarks/README.md` is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.checkpoints import LLAMA, free_bytes, llama_nbytes, make_llama, make_metadata
from benchmarks.measure import Command, CommandFailed, peak_anonymous_bytes, seconds

CP_RATIO = 1.5  # times of `cp` that a conversion may take, in addition to the time of `import torch`
CHECKSUM_RATIO = 1.1  # time of a conversion with checksums, relative to one without
PEAK_MIB = 512
DEEP_RATIO = 1.1  # peak memory of a model four times as deep, relative to that of the model
HELP_SECONDS = 0.3
INSPECT_SECONDS = 2.0
INSPECT_ENTRIES = 100_000

MEMORY = Path("/dev/shm")
IMPORT_TORCH: Command = (sys.executable, "-c", "import torch")
COMMAND = (sys.executable, "-m", "mcore_convert")


@dataclass(frozen=True)
class Figure:
    """Line of the report: a measured value beside its target, if it has one."""

    what: str
    value: float
    unit: str
    target: float | None = None
    note: str = ""

    @property
    def missed(self) -> bool:
        return self.target is not None and self.value > self.target


def convert(source: Path, target: Path, to: str, *options: str) -> Command:
    return (*COMMAND, "convert", source, target, "--to", to, *options)


def copy(source: Path, target: Path) -> Command:
    return ("cp", "-r", source, target)


def timed(command: Command, target: Path, *, fsync: bool = False) -> float:
    """Return the wall time of a command that makes `target`, then removed; with `fsync` until it is on the disk."""
    try:
        elapsed = seconds(command)
        return elapsed + (seconds(("sync", "-f", target)) if fsync else 0)
    finally:
        shutil.rmtree(target, ignore_errors=True)


def speed(place: Path, hf: Path, rounds: int, *, fsync: bool = False) -> list[Figure]:
    """Measure both directions against `cp` of the same bytes. The commands alternate, so that drift hits all."""
    dist, target = place / "dist", place / "target"
    seconds(convert(hf, dist, "torch_dist"))  # the source of the way back; warms up both
    times: dict[str, list[float]] = {}
    for _ in range(rounds):
        times.setdefault("import", []).append(seconds(IMPORT_TORCH))
        for source, to in ((hf, "torch_dist"), (dist, "hf")):
            times.setdefault("cp " + to, []).append(timed(copy(source, target), target, fsync=fsync))
            times.setdefault(to, []).append(timed(convert(source, target, to), target, fsync=fsync))
            if not fsync:
                bare = convert(source, target, to, "--no-checksums")
                times.setdefault("bare " + to, []).append(timed(bare, target))
    median = {what: statistics.median(values) for what, values in times.items()}
    where = f" to {'disk' if fsync else place.parent}"
    figures = [] if fsync else [Figure("import torch", median["import"], "s")]
    for name, to in (("hf -> torch_dist", "torch_dist"), ("torch_dist -> hf", "hf")):
        cp, taken = median["cp " + to], median[to]
        limit = None if fsync else CP_RATIO * cp + median["import"]
        figures.append(Figure(f"cp, the bytes of {name}{where}", cp, "s"))
        figures.append(Figure(f"{name}{where}", taken, "s", limit, f"{taken / cp:.2f} x cp"))
        if not fsync:  # pair by pair, so that drift of the machine cancels out
            ratio = statistics.median(a / b for a, b in zip(times[to], times["bare " + to], strict=True))
            figures.append(Figure(f"{name}, over the same without checksums", ratio, "x", CHECKSUM_RATIO))
    return figures


def memory(place: Path, config: dict[str, object], *, sparse: bool = False) -> dict[str, float]:
    """Return the peak anonymous memory in MiB of both directions."""
    hf, dist, back = make_llama(place / "hf", config, sparse=sparse), place / "dist", place / "back"
    forth = peak_anonymous_bytes(convert(hf, dist, "torch_dist"))
    shutil.rmtree(hf)
    return {
        "hf -> torch_dist": forth / 2**20,
        "torch_dist -> hf": peak_anonymous_bytes(convert(dist, back, "hf")) / 2**20,
    }


def instant(place: Path) -> list[Figure]:
    """Return the times of commands that only start up: medians of five runs."""
    script = Path(sys.executable).parent / "mcore-convert"
    shown = (script, "--help") if script.exists() else (*COMMAND, "--help")
    path = make_metadata(place / "metadata", INSPECT_ENTRIES)
    inspect = (*COMMAND, "inspect", path, "--json")
    times = [statistics.median(seconds(command) for _ in range(5)) for command in (shown, inspect)]
    return [
        Figure("mcore-convert --help", times[0], "s", HELP_SECONDS),
        Figure(f"inspect --json, {INSPECT_ENTRIES:,} entries", times[1], "s", INSPECT_SECONDS),
    ]


def available_bytes(path: Path) -> int:
    """Return the room below `path`; in memory, the amount that can be used without disturbing others."""
    if not path.is_dir() or not os.access(path, os.W_OK):
        return 0
    if path != MEMORY:
        return free_bytes(path)
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return min(free_bytes(path), available - (2 << 30))  # 2 GiB for the measured process and all else


def roomy(nbytes: int, *places: Path) -> Path | None:
    """Return the first of the places with that much room."""
    return next((place for place in places if available_bytes(place) > 1.1 * nbytes), None)


def folder(place: Path) -> AbstractContextManager[str]:
    return tempfile.TemporaryDirectory(prefix="mcore-convert-bench-", dir=place)


def measure(rounds: int, layers: int, skipped: Sequence[str]) -> list[Figure]:
    """Return all figures; measurements without room are reported and left out."""
    config = LLAMA | {"num_hidden_layers": layers}
    deep = LLAMA | {"num_hidden_layers": 4 * layers}
    disk = Path(tempfile.gettempdir())
    # source, its other form and one more copy at a time
    place = roomy(3 * llama_nbytes(config), MEMORY, disk)
    if place is None:
        raise SystemExit(f"error: {3.3 * llama_nbytes(config) / 1e9:.1f} GB of room are needed in {MEMORY} or {disk}")
    say(f"{llama_nbytes(config) / 1e9:.2f} GB of bfloat16, in {place}, medians of {rounds} rounds")
    with folder(place) as path:
        figures = speed(Path(path), make_llama(Path(path) / "hf", config), rounds)
    with folder(place) as path:
        peaks = memory(Path(path), config)
    figures += [Figure(f"peak memory, {name}", peak, "MiB", PEAK_MIB) for name, peak in peaks.items()]

    where = roomy(2 * llama_nbytes(deep), disk, MEMORY)
    if "deep" in skipped or where is None:
        say(f"skipped: a model of {4 * layers} layers, {2.2 * llama_nbytes(deep) / 1e9:.0f} GB of room")
    else:
        say(f"a model of {4 * layers} layers, for its memory only")
        with folder(where) as path:
            for name, peak in memory(Path(path), deep, sparse=True).items():
                limit = DEEP_RATIO * peaks[name]
                note = f"{peak / peaks[name]:.2f} x that of {layers} layers"
                figures.append(Figure(f"peak memory, {name}, {4 * layers} layers", peak, "MiB", limit, note))

    if "disk" in skipped or place == disk or roomy(3 * llama_nbytes(config), disk) is None:
        say("skipped: the figures of the disk")
    else:
        say(f"the disk of {disk}, written through")
        with folder(disk) as path:
            figures += speed(Path(path), make_llama(Path(path) / "hf", config), min(rounds, 3), fsync=True)

    with folder(disk) as path:
        return figures + instant(Path(path))


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def table(figures: Sequence[Figure]) -> str:
    """Return the figures as a Markdown table."""
    lines = ["| measure | value | target | |", "| --- | ---: | ---: | --- |"]
    for figure in figures:
        digits = 0 if figure.unit == "MiB" else 2
        target = "" if figure.target is None else f"{figure.target:.{digits}f} {figure.unit}"
        note = " ".join(filter(None, ["**missed**" if figure.missed else "", figure.note]))
        lines.append(f"| {figure.what} | {figure.value:.{digits}f} {figure.unit} | {target} | {note} |")
    return "\n".join(lines)


def parser_of(about: str | None, *, layers: bool = False) -> argparse.ArgumentParser:
    """Return the parser of the options that every benchmark of commands has; `layers`: with the depth of its model."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each command (default: %(default)s)")
    if layers:
        parser.add_argument("--layers", type=int, default=16, help="depth of the model (default: %(default)s)")
    return parser


def reported(measured: Callable[[], Sequence[Figure]], path: Path | None) -> int:
    """Measure, print the table, write the figures to `path`, and return the exit code: 1 if a target is missed."""
    try:
        figures = measured()
    except CommandFailed as failure:
        say(f"error: {failure}")
        return 1
    print(table(figures))
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [asdict(figure) | {"missed": figure.missed} for figure in figures]
        path.write_text(json.dumps(rows, indent=2) + "\n")
    return int(any(figure.missed for figure in figures))


def main() -> int:
    parser = parser_of(__doc__, layers=True)
    parser.add_argument("--skip", action="append", default=[], choices=["deep", "disk"], help="leave a part out")
    options = parser.parse_args()
    return reported(lambda: measure(options.rounds, options.layers, options.skip), options.json)


if __name__ == "__main__":
    sys.exit(main())
