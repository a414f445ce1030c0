"""Measures `export` against `cp`, `sha256sum` and `import torch`, with and without rounding, and its memory.

    python -m benchmarks.export [--json FILE] [--rounds 5] [--layers 16]

Exits with 1 when a target of `benchmarks/README.md` is missed.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.checkpoints import LLAMA, llama_nbytes, make_llama, nbytes_of
from benchmarks.convert import (
    COMMAND,
    IMPORT_TORCH,
    MEMORY,
    PEAK_MIB,
    Figure,
    convert,
    copy,
    folder,
    parser_of,
    reported,
    roomy,
    say,
    timed,
)
from benchmarks.measure import Command, peak_anonymous_bytes, seconds

# Every byte is copied once, then read again from the source and the target: three passes, one with a hash.
CP_RATIO = 3.0
TOKENS, MERGES = 128_000, 280_147  # of Llama 3's tokenizer
STREAM = """
import sys
from mcore_convert import iter_hf_weights
for name, tensor in iter_hf_weights(sys.argv[1]):
    del tensor
"""


def export(source: Path, target: Path, *options: str) -> Command:
    return (*COMMAND, "export", source, target, *options)


def make_tokenizer(path: Path) -> None:
    """Write a `tokenizer.json` as large as Llama 3's, of 128,256 tokens."""
    vocab = {f"token{number:07d}": number for number in range(TOKENS)}
    merges = [[f"part{number:06d}", f"{number:06d}"] for number in range(MERGES)]
    added = [{"id": TOKENS + number, "content": f"<|special_{number}|>", "special": True} for number in range(256)]
    content = {"model": {"type": "BPE", "vocab": vocab, "merges": merges}, "added_tokens": added}
    path.write_text(json.dumps(content))


def measure(rounds: int, layers: int) -> list[Figure]:
    """Return all figures. The commands of a round alternate, so that drift of the machine hits all."""
    config = LLAMA | {"num_hidden_layers": layers}
    disk, nbytes = Path(tempfile.gettempdir()), llama_nbytes(config)
    place = roomy(2 * nbytes, MEMORY, disk)
    if place is None:
        raise SystemExit(f"error: {2.2 * nbytes / 1e9:.1f} GB of room are needed in {MEMORY} or {disk}")
    with folder(place) as name:
        hf, source, target = make_llama(Path(name, "hf"), config), Path(name, "source"), Path(name, "target")
        make_tokenizer(hf / "tokenizer.json")
        seconds(convert(hf, source, "torch_dist"))
        shutil.rmtree(hf)
        say(f"{nbytes / 1e9:.2f} GB of bfloat16, in {place}, medians of {rounds} rounds")
        kinds: dict[str, tuple[str, ...]] = {"export": (), "export --dtype float16": ("--dtype", "float16")}
        peaks = {}
        for kind, words in kinds.items():
            peaks[kind] = peak_anonymous_bytes(export(source, target, *words)) / 2**20
            shutil.rmtree(target)
        stream = peak_anonymous_bytes((sys.executable, "-c", STREAM, str(source))) / 2**20
        weights = sorted(source.rglob("*.distcp"))
        times: dict[str, list[float]] = {}
        for _ in range(rounds):
            times.setdefault("import torch", []).append(seconds(IMPORT_TORCH))
            times.setdefault("sha256sum", []).append(seconds(("sha256sum", *weights)))
            times.setdefault("cp", []).append(timed(copy(source, target), target))
            for kind, words in kinds.items():
                times.setdefault(kind, []).append(timed(export(source, target, *words), target))
    median = {what: statistics.median(values) for what, values in times.items()}
    limit = CP_RATIO * median["cp"] + median["import torch"]
    figures = [Figure(what, median[what], "s") for what in ("import torch", "sha256sum", "cp")]
    for kind, words in kinds.items():
        allowed = None if words else limit
        figures.append(Figure(kind, median[kind], "s", allowed, f"{median[kind] / median['cp']:.2f} x cp"))
        figures.append(Figure(f"peak memory, {kind}", peaks[kind], "MiB", PEAK_MIB))
    largest = nbytes_of((config["vocab_size"], config["hidden_size"])) / 2**20
    note = f"with torch, and a largest tensor of {largest:.0f} MiB"
    return [*figures, Figure("peak memory, iter_hf_weights", stream, "MiB", None, note)]


def main() -> int:
    parser = parser_of(__doc__, layers=True)
    options = parser.parse_args()
    return reported(lambda: measure(options.rounds, options.layers), options.json)


if __name__ == "__main__":
    sys.exit(main())
