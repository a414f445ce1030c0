"""Measures planning of a reshard of 1,024 rank files with optimizer state, and its memory.

    python -m benchmarks.plan_ranks [--json FILE] [--rounds 3]

The tensors are tiny, and as many as those of large models: what counts is files and headers. Files are sparse. Exits
with 1 when a target of `benchmarks/README.md` is missed.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import LLAMA
from benchmarks.convert import Figure, folder, parser_of, reported, say
from benchmarks.experts import QWEN3_235B
from benchmarks.measure import peak_anonymous_bytes, seconds
from benchmarks.plan import planned
from benchmarks.ranks import reserve_ranks
from mcore_convert.options import LayoutOptions
from mcore_convert.spec.layout import Layout

PLAN_SECONDS, PEAK_MIB, RANKS = 60.0, 1024.0, 1024
TINY: dict[str, Any] = {
    "head_dim": 8,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
    "vocab_size": 1024,
}
DENSE = LLAMA | TINY | {"num_hidden_layers": 128}
EXPERTS = QWEN3_235B | TINY | {"num_hidden_layers": 96}
# For each model the family, the layout of the source and that of the target.
MODELS: dict[str, tuple[dict[str, Any], str, Layout, LayoutOptions]] = {
    "128 layers, TP8 PP128 -> TP4 PP2": (DENSE, "llama", Layout(tp=8, pp=128), {"tp": 4, "pp": 2}),
    "96 layers of 128 experts, TP8 PP16 EP64 ETP1 -> TP4 PP8 EP16 ETP1": (
        EXPERTS,
        "qwen3_moe",
        Layout(tp=8, pp=16, ep=64, etp=1),
        {"tp": 4, "pp": 8, "ep": 16, "etp": 1},
    ),
}


def measure(rounds: int) -> list[Figure]:
    """Return all figures: for the state of each optimizer, in rank files and beside them."""
    figures = []
    for what, (config, family, layout, wanted) in MODELS.items():
        for optimizer in ("plain", "distributed"):
            with folder(Path(tempfile.gettempdir())) as name:
                source = Path(name) / "source"
                reserve_ranks(source, config, layout, name=family, distributed=optimizer == "distributed")
                count = len(list(source.glob("iter_*/*/model_optim_rng.pt")))
                assert count == RANKS, count
                command = planned("reshard", source, Path(name) / "target", "torch", wanted)
                taken = statistics.median(seconds(command) for _ in range(rounds))
                peak = peak_anonymous_bytes(command) / 2**20
            say(f"{count} ranks, {what}, {optimizer} optimizer")
            figures.append(Figure(f"plan of {what}, {optimizer} optimizer", taken, "s", PLAN_SECONDS))
            figures.append(Figure("peak memory of it", peak, "MiB", PEAK_MIB))
    return figures


def main() -> int:
    parser = parser_of(__doc__)
    parser.set_defaults(rounds=3)
    options = parser.parse_args()
    return reported(lambda: measure(options.rounds), options.json)


if __name__ == "__main__":
    sys.exit(main())
