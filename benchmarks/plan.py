"""Measures planning for mixtures of experts of 235 billion to a trillion parameters, both ways, and its memory.

    python -m benchmarks.plan [--json FILE] [--rounds 5] [--layers 94] [--deepseek-layers 61]

Files are sparse: they have their headers and their size, and no values. Exits with 1 when a target of
`benchmarks/README.md` is missed.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from benchmarks.checkpoints import write_headers
from benchmarks.convert import COMMAND, PEAK_MIB, Figure, folder, parser_of, reported, say
from benchmarks.deepseek import DEEPSEEK_V3, KIMI_K2, deepseek_nbytes, make_deepseek, make_fp8
from benchmarks.experts import QWEN3_235B, make_qwen3_moe, qwen3_moe_nbytes
from benchmarks.measure import Command, peak_anonymous_bytes, seconds
from mcore_convert import convert
from mcore_convert.options import LayoutOptions

PLAN_SECONDS = 10.0
FP8_PEAK_MIB = 1024.0
SHARDS, DEEPSEEK_SHARDS, KIMI_SHARDS = 118, 163, 61  # files of the models on the Hub
# Whole experts over 8 ranks, the other weights over 4: 64 rank files.
LAYOUT: LayoutOptions = {"tp": 4, "pp": 2, "ep": 8, "etp": 1}
OTHER: LayoutOptions = {"tp": 2, "pp": 1, "ep": 4, "etp": 1}
# 61 layers cannot be split into equal pipeline stages.
DEEPSEEK_LAYOUT: LayoutOptions = {"tp": 4, "pp": 1, "ep": 16, "etp": 1}


def planned(verb: str, source: Path, target: Path, to: str, layout: LayoutOptions) -> Command:
    """Return the command that plans a conversion or a reshard, and writes nothing."""
    options = [word for name, size in layout.items() for word in (f"--{name}", str(size))]
    return (*COMMAND, verb, source, target, "--to", to, *options, "--dry-run", "--json")


def measure(rounds: int, layers: int, deepseek_layers: int) -> list[Figure]:
    """Return all figures. The way back and reshards start from the result of the first plan, without values."""
    return [
        *_measure_qwen(rounds, layers),
        *_measure_deepseek(rounds, deepseek_layers),
        *_measure_fp8(rounds, deepseek_layers),
    ]


def _measure_deepseek(rounds: int, layers: int) -> list[Figure]:
    config = DEEPSEEK_V3 | {"num_hidden_layers": layers}
    with folder(Path(tempfile.gettempdir())) as name:
        place = Path(name)
        hf = make_deepseek(place / "hf", config, shards=DEEPSEEK_SHARDS)
        say(f"{deepseek_nbytes(config) / 2e9:.0f} billion parameters in sparse files, medians of {rounds} rounds")
        write_headers(convert(hf, place / "dist", to="torch_dist", dry_run=True).plan.reservation)
        write_headers(convert(hf, place / "torch", to="torch", dry_run=True, **DEEPSEEK_LAYOUT).plan.reservation)
        target = place / "target"
        commands = {
            "DeepSeek-V3, hf -> torch_dist": planned("convert", hf, target, "torch_dist", {}),
            "DeepSeek-V3, hf -> torch, TP4 EP16 ETP1": planned("convert", hf, target, "torch", DEEPSEEK_LAYOUT),
            "DeepSeek-V3, torch_dist -> hf": planned("convert", place / "dist", target, "hf", {}),
            "DeepSeek-V3, torch, TP4 EP16 ETP1 -> hf": planned("convert", place / "torch", target, "hf", {}),
        }
        return _figures(commands, rounds)


def _measure_fp8(rounds: int, layers: int) -> list[Figure]:
    """Measure DeepSeek-V3 and Kimi K2 in the form of the Hub, decoded during the conversion."""
    commands: dict[str, Command] = {}
    with folder(Path(tempfile.gettempdir())) as name:
        place = Path(name)
        for what, model, shards in (("DeepSeek-V3", DEEPSEEK_V3, DEEPSEEK_SHARDS), ("Kimi K2", KIMI_K2, KIMI_SHARDS)):
            config = model | {"num_hidden_layers": layers}
            source = make_fp8(place / model["model_type"], config, shards=shards)
            say(f"{what} in fp8, {deepseek_nbytes(config) / 2e9:.0f} billion parameters in sparse files")
            target = place / "target"
            commands[f"{what} in fp8, hf -> torch_dist"] = planned("convert", source, target, "torch_dist", {})
            to_torch = planned("convert", source, target, "torch", DEEPSEEK_LAYOUT)
            commands[f"{what} in fp8, hf -> torch, TP4 EP16 ETP1"] = to_torch
        return _figures(commands, rounds, FP8_PEAK_MIB)


def _measure_qwen(rounds: int, layers: int) -> list[Figure]:
    config = QWEN3_235B | {"num_hidden_layers": layers}
    with folder(Path(tempfile.gettempdir())) as name:
        place = Path(name)
        hf = make_qwen3_moe(place / "hf", config, shards=SHARDS, sparse=True)
        say(f"{qwen3_moe_nbytes(config) / 2e9:.0f} billion parameters in sparse files, medians of {rounds} rounds")
        write_headers(convert(hf, place / "dist", to="torch_dist", dry_run=True).plan.reservation)
        write_headers(convert(hf, place / "torch", to="torch", dry_run=True, **LAYOUT).plan.reservation)
        target = place / "target"
        commands = {
            "hf -> torch_dist": planned("convert", hf, target, "torch_dist", {}),
            "hf -> torch, TP4 PP2 EP8 ETP1": planned("convert", hf, target, "torch", LAYOUT),
            "torch_dist -> hf": planned("convert", place / "dist", target, "hf", {}),
            "torch, TP4 PP2 EP8 ETP1 -> hf": planned("convert", place / "torch", target, "hf", {}),
            "torch_dist -> torch, TP4 PP2 EP8 ETP1": planned("reshard", place / "dist", target, "torch", LAYOUT),
            "torch, TP4 PP2 EP8 ETP1 -> TP2 EP4 ETP1": planned("reshard", place / "torch", target, "torch", OTHER),
        }
        return _figures(commands, rounds)


def _figures(commands: Mapping[str, Command], rounds: int, peak: float = PEAK_MIB) -> list[Figure]:
    figures = []
    for what, command in commands.items():
        taken = statistics.median(seconds(command) for _ in range(rounds))
        figures.append(Figure(f"plan of {what}", taken, "s", PLAN_SECONDS))
        figures.append(Figure("peak memory of it", peak_anonymous_bytes(command) / 2**20, "MiB", peak))
    return figures


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--layers", type=int, default=94, help="depth of the model (default: %(default)s)")
    parser.add_argument("--deepseek-layers", type=int, default=61, help="that of DeepSeek-V3 (default: %(default)s)")
    options = parser.parse_args()
    return reported(lambda: measure(options.rounds, options.layers, options.deepseek_layers), options.json)


if __name__ == "__main__":
    sys.exit(main())
