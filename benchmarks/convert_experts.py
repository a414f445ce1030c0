"""Measures conversion of many small experts against `cp` and `import torch`, and its memory.

    python -m benchmarks.convert_experts [--json FILE] [--rounds 5]

Exits with 1 when a target of `benchmarks/README.md` is missed.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks.convert import MEMORY, PEAK_MIB, Figure, convert, folder, parser_of, reported, roomy, say, speed
from benchmarks.experts import SMALL_EXPERTS, make_qwen3_moe, qwen3_moe_nbytes, qwen3_moe_shapes
from benchmarks.measure import peak_anonymous_bytes


def measure(rounds: int) -> list[Figure]:
    """Return all figures, in memory if there is room."""
    nbytes = qwen3_moe_nbytes(SMALL_EXPERTS)
    disk = Path(tempfile.gettempdir())
    place = roomy(3 * nbytes, MEMORY, disk)
    if place is None:
        raise SystemExit(f"error: {3.3 * nbytes / 1e9:.1f} GB of room are needed in {MEMORY} or {disk}")
    count = len(qwen3_moe_shapes(SMALL_EXPERTS))
    say(f"{nbytes / 1e9:.2f} GB of bfloat16 in {count} tensors, in {place}, medians of {rounds} rounds")
    with folder(place) as name:
        path = Path(name)
        hf = make_qwen3_moe(path / "hf", SMALL_EXPERTS, shards=2)
        figures = [replace(figure, what=f"{figure.what}, experts") for figure in speed(path, hf, rounds)]
        for source, to in ((hf, "torch_dist"), (path / "dist", "hf")):
            peak = peak_anonymous_bytes(convert(source, path / f"to {to}", to)) / 2**20
            figures.append(Figure(f"peak memory of experts to {to}", peak, "MiB", PEAK_MIB))
        return figures


def main() -> int:
    options = parser_of(__doc__).parse_args()
    return reported(lambda: measure(options.rounds), options.json)


if __name__ == "__main__":
    sys.exit(main())
