"""Measures `inspect --stats`, `inspect --html` and `diff` against reading the same files, and memory, of `verify` too.

    python -m benchmarks.inspection [--json FILE] [--rounds 5] [--layers 16]

Exits with 1 when a target of `benchmarks/README.md` is missed.
"""

from __future__ import annotations

import resource
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.checkpoints import LLAMA, llama_nbytes, make_llama
from benchmarks.convert import COMMAND, MEMORY, PEAK_MIB, Figure, convert, folder, parser_of, reported, roomy, say
from benchmarks.measure import Command, peak_anonymous_bytes, seconds

# Llama 3 8B's embedding, the largest tensor of most models, over one small layer.
EMBEDDING = LLAMA | {"num_hidden_layers": 1, "hidden_size": 4096, "intermediate_size": 512, "num_attention_heads": 64}
DIFFERENT = 1  # the exit code of `diff` and `verify`
READ_RATIO = 2.0  # times of reading the files that it may take, in addition to that of reading headers


def read(*folders: Path) -> Command:
    """Return a command that only reads every file with weights."""
    return ("cat", *(file for each in folders for file in sorted(each.rglob("*")) if file.stat().st_size > 1 << 20))


def cpu_seconds() -> float:
    """Return the processor time of all commands so far: it shows how much of a time was spent waiting for others."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def verify_memory(place: Path) -> dict[str, float]:
    """Return the peak anonymous memory in MiB of `verify` of a large embedding: equal, changed, and of two dtypes."""
    with folder(place) as name:
        path = Path(name)
        source, dist, changed, wide = (path / each for each in ("hf", "dist", "changed", "wide"))
        make_llama(source, EMBEDDING)
        make_llama(changed, EMBEDDING, seed=1)
        seconds(convert(source, dist, "torch_dist"))
        seconds((*COMMAND, "export", dist, wide, "--no-tokenizer", "--dtype", "float32"))
        runs = {"the same": (dist, 0), "other values": (changed, DIFFERENT), "fp32": (wide, DIFFERENT)}
        return {
            f"verify, bf16 and {what}": peak_anonymous_bytes((*COMMAND, "verify", source, other), code) / 2**20
            for what, (other, code) in runs.items()
        }


def measure(rounds: int, layers: int) -> list[Figure]:
    """Return all figures. The commands of a round alternate, so that drift of the machine hits all."""
    config = LLAMA | {"num_hidden_layers": layers}
    nbytes = llama_nbytes(config)
    disk = Path(tempfile.gettempdir())
    needed = max(3 * nbytes, 5 * llama_nbytes(EMBEDDING))  # `verify`: bfloat16 three times, and fp32
    place = roomy(needed, MEMORY, disk)
    if place is None:
        raise SystemExit(f"error: {1.1 * needed / 1e9:.1f} GB of room are needed in {MEMORY} or {disk}")
    say(f"{nbytes / 1e9:.2f} GB of bfloat16, in {place}, medians of {rounds} rounds")
    with folder(place) as name:
        path = Path(name)
        source, dist, changed = make_llama(path / "hf", config), path / "dist", path / "changed"
        make_llama(changed, config, seed=1)
        seconds(convert(source, dist, "torch_dist"))
        commands: dict[str, tuple[Command, tuple[Path, ...]]] = {
            "inspect --stats, hf": ((*COMMAND, "inspect", source, "--stats"), (source,)),
            "inspect --stats, torch_dist": ((*COMMAND, "inspect", dist, "--stats"), (dist,)),
            "inspect --html, hf": ((*COMMAND, "inspect", source, "--html", path / "page.html"), (source,)),
            "diff, hf and another hf": ((*COMMAND, "diff", source, changed), (source, changed)),
            "diff, torch_dist and another hf": ((*COMMAND, "diff", dist, changed), (dist, changed)),
            "diff, hf and the same as torch_dist": ((*COMMAND, "diff", source, dist), (source, dist)),
        }
        headers = (*COMMAND, "inspect", source)
        codes = {what: DIFFERENT if "another" in what else 0 for what in commands}
        peaks = {what: peak_anonymous_bytes(command, codes[what]) / 2**20 for what, (command, _) in commands.items()}
        times: dict[str, list[float]] = {}
        busy: dict[str, list[float]] = {}
        for _ in range(rounds):
            times.setdefault("headers", []).append(seconds(headers))
            for what, (command, files) in commands.items():
                times.setdefault(f"read {what}", []).append(seconds(read(*files)))
                before = cpu_seconds()
                times.setdefault(what, []).append(seconds(command, codes[what]))
                busy.setdefault(what, []).append(cpu_seconds() - before)
        page = (path / "page.html").stat().st_size
    peaks |= verify_memory(place)
    median = {what: statistics.median(values) for what, values in times.items()}
    figures = [Figure("inspect, headers only", median["headers"], "s")]
    for what, (_, files) in commands.items():
        reading, taken = median[f"read {what}"], median[what]
        rate = len(files) * nbytes / max(taken - median["headers"], 1e-9) / 1e9
        note = f"{rate:.1f} GB/s beside the headers; {statistics.median(busy[what]):.2f} s of processors"
        figures.append(Figure(f"cat, the files of {what}", reading, "s"))
        limit = READ_RATIO * reading + median["headers"]
        figures.append(Figure(what, taken, "s", limit, note))
    figures += [Figure(f"peak memory, {what}", peak, "MiB", PEAK_MIB) for what, peak in peaks.items()]
    return [*figures, Figure("the page", page / 1e6, "MB", 1.0)]


def main() -> int:
    parser = parser_of(__doc__, layers=True)
    options = parser.parse_args()
    return reported(lambda: measure(options.rounds, options.layers), options.json)


if __name__ == "__main__":
    sys.exit(main())
