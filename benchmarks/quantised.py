"""Measures the decoding of quantised models against `cp` of what is written, and its memory.

    python -m benchmarks.quantised [--json FILE] [--rounds 5] [--layers 4]

Exits with 1 when a target of `benchmarks/README.md` is missed.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import LLAMA, llama_nbytes, llama_shapes
from benchmarks.convert import (
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
from benchmarks.measure import peak_anonymous_bytes, seconds

CP_RATIO = {"fp8": 4.0}  # times of `cp` that decoding may take: a quarter of its speed
LAYER = {"hidden_size": 4096, "intermediate_size": 14336, "head_dim": 128, "vocab_size": 8192}
GROUP = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
FORMS: dict[str, dict[str, Any]] = {
    "fp8": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "int4": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": GROUP}},
    },
}


def make_quantised(path: Path, config: dict[str, Any], form: str) -> Path:
    """Write a Llama with random codes and scales, one file per layer."""
    import torch
    from safetensors.torch import save_file

    path.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    files: dict[str, dict[str, torch.Tensor]] = {}
    for name, shape in llama_shapes(config).items():
        layer = name.split(".")[2] if name.startswith("model.layers.") else "ends"
        tensors = files.setdefault(f"model-{layer}.safetensors", {})
        if not name.endswith("_proj.weight"):
            tensors[name] = torch.randn(shape, generator=generator).to(torch.bfloat16)
        elif form == "fp8":
            codes = torch.randint(0, 0x7F, shape, dtype=torch.uint8, generator=generator)
            tensors[name] = codes.view(torch.float8_e4m3fn)
            grid = [-(-size // 128) for size in shape]
            tensors[f"{name}_scale_inv"] = torch.rand(grid, generator=generator) * 1e-3
        else:
            words = torch.randint(-(2**31), 2**31, (shape[0], shape[1] // 8), generator=generator)
            tensors[f"{name}_packed"] = words.to(torch.int32)
            scales = torch.rand((shape[0], shape[1] // 32), generator=generator) * 1e-3
            tensors[f"{name}_scale"] = scales.to(torch.bfloat16)
            tensors[f"{name}_shape"] = torch.tensor(shape)
    for file, tensors in files.items():
        save_file(tensors, path / file, {"format": "pt"})
    weight_map = {name: file for file, tensors in files.items() for name in tensors}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": FORMS[form]}))
    return path


def measure(rounds: int, layers: int) -> list[Figure]:
    """Return all figures. The commands of a round alternate, so that drift of the machine hits all."""
    config = LLAMA | LAYER | {"num_hidden_layers": layers, "tie_word_embeddings": False}
    nbytes = llama_nbytes(config)
    place = roomy(3 * nbytes, MEMORY, Path(tempfile.gettempdir()))
    if place is None:
        raise SystemExit(f"error: {3.3 * nbytes / 1e9:.1f} GB of room are needed in {MEMORY}")
    say(f"{nbytes / 1e9:.2f} GB of bfloat16 once decoded, in {place}, medians of {rounds} rounds")
    figures = []
    for form in FORMS:
        with folder(place) as name:
            source, dist, target = make_quantised(Path(name, "hf"), config, form), Path(name, "dist"), Path(name, "to")
            peak = peak_anonymous_bytes(convert(source, dist, "torch_dist")) / 2**20
            times: dict[str, list[float]] = {}
            for _ in range(rounds):
                times.setdefault("import torch", []).append(seconds(IMPORT_TORCH))
                times.setdefault("cp", []).append(timed(copy(dist, target), target))
                before = _processor_seconds()
                taken = timed(convert(source, target, "torch_dist"), target)
                times.setdefault(form, []).append(taken)
                times.setdefault("busy", []).append((_processor_seconds() - before) / taken)
        median = {what: statistics.median(values) for what, values in times.items()}
        limit = CP_RATIO[form] * median["cp"] + median["import torch"] if form in CP_RATIO else None
        note = f"{median[form] / median['cp']:.2f} x cp, {nbytes / median[form] / 1e9:.2f} GB/s written"
        figures += [
            Figure(f"cp, what is decoded from {form}", median["cp"], "s"),
            Figure(f"{form} -> torch_dist in bfloat16", median[form], "s", limit, note),
            Figure(f"processors that {form} keeps busy", median["busy"], "of 2", None, f"of {os.cpu_count()}"),
            Figure(f"peak memory, {form}", peak, "MiB", PEAK_MIB),
        ]
    return figures


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> int:
    parser = parser_of(__doc__, layers=True)
    parser.set_defaults(layers=4)
    options = parser.parse_args()
    return reported(lambda: measure(options.rounds, options.layers), options.json)


if __name__ == "__main__":
    sys.exit(main())
