"""The forms of tensors that a `quantization_config` describes. Unknown keys and values are refused by name.

Three methods are read, with the names and shapes of

- `fp8`: transformers 5.23 `integrations/finegrained_fp8.py`, and DeepSeek-V3's `inference/kernel.py`, which truncates
  blocks at the edges if a size is not a multiple of the block's;
- `compressed-tensors`: compressed-tensors 0.12 `quantization/quant_args.py`, `quant_config.py`, `compressors/`;
- `mxfp4`: transformers 5.23 `integrations/mxfp4.py`. It stores experts as `[experts, out, in]` under the names of
  tensors that are `[experts, in, out]`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mcore_convert.formats.hf.forms import Block, Form, bind_mxfp4, bind_packed, bind_plain
from mcore_convert.spec.config.mapping import shown

Values = Mapping[str, Any]


@dataclass
class Problems:
    """Unsupported parts of a configuration, one line each."""

    lines: list[str] = field(default_factory=list)

    def expect(self, values: Values, known: Mapping[str, tuple[Any, ...] | None], where: str = "") -> None:
        """Note unknown keys, and values that a key does not allow; None allows any value."""
        for key, value in values.items():
            allowed = known.get(key, ())
            if key not in known:
                self.lines.append(f"unknown key `{where}{key}` = {shown(value)}")
            elif allowed is not None and value not in allowed:
                self.lines.append(f"`{where}{key}` = {shown(value)}")


# fp8

_FP8: dict[str, tuple[Any, ...] | None] = {
    "quant_method": None,
    "fmt": ("e4m3", "float8_e4m3fn"),
    "activation_scheme": ("dynamic",),
    "weight_block_size": None,
    "modules_to_not_convert": None,
    "modules_to_convert": None,
    "ignored_layers": None,
    "scale_fmt": ("float", "ue8m0", None),
    "expert_dtype": ("fp8",),
    "dequantize": (False, True),
}


def _fp8(values: Values, problems: Problems) -> Iterator[Form]:
    problems.expect(values, _FP8)
    sizes = values.get("weight_block_size", [128, 128])
    if sizes is not None and not _is_block(sizes):
        problems.lines.append(f"`weight_block_size` = {shown(sizes)} is no pair of sizes")
        return
    code, block = "float8_e4m3fn", (None, None) if sizes is None else (sizes[0], sizes[1])  # one scale for a matrix
    yield Form(f"{code}, {_in_words(block)}", ("", "_scale_inv"), (), "", partial(bind_plain, code, block))


def _is_block(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(type(size) is int and size > 0 for size in value)


# compressed-tensors

_COMPRESSED: dict[str, tuple[Any, ...] | None] = {
    "quant_method": None,
    "config_groups": None,
    "format": None,
    "ignore": None,
    "quantization_status": ("compressed",),
    "global_compression_ratio": None,
    "kv_cache_scheme": (None,),
    "sparsity_config": (None, {}, {"format": "dense"}),
    "transform_config": (None, {}),
    "version": None,
    "run_compressed": None,
}
_GROUP: dict[str, tuple[Any, ...] | None] = {
    "targets": None,
    "weights": None,
    "input_activations": None,
    "output_activations": (None,),
    "format": None,
}
_WEIGHTS: dict[str, tuple[Any, ...] | None] = {
    "num_bits": (4, 8),
    "type": ("int", "float"),
    "symmetric": (True, False),
    "strategy": (None, "tensor", "channel", "group", "block"),
    "group_size": None,
    "block_structure": None,
    "dynamic": (False,),
    "actorder": (None, False, "weight", "static"),  # `group` permutes columns between groups
    "observer": None,
    "observer_kwargs": None,
    "scale_dtype": None,
    "zp_dtype": None,
}
_PLAIN = {("float", 8): "float8_e4m3fn", ("int", 8): "int8"}
_PACKED = {("int", 4): "packed int4", ("int", 8): "packed int8"}
_FORMATS = {
    "pack-quantized": _PACKED,
    "float-quantized": _PLAIN,
    "int-quantized": _PLAIN,
    "naive-quantized": _PLAIN,
}


def _compressed(values: Values, problems: Problems) -> Iterator[Form]:
    problems.expect(values, _COMPRESSED)
    groups = values.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        problems.lines.append(f"`config_groups` = {shown(groups)} is no table of groups")
        return
    for name, group in groups.items():
        where = f"config_groups.{name}."
        problems.expect(group, _GROUP, where)
        activations, weights = group.get("input_activations"), group.get("weights")
        if isinstance(activations, dict) and activations.get("dynamic") is not True:
            problems.lines.append(f"`{where}input_activations.dynamic` = {shown(activations.get('dynamic'))}")
        if not isinstance(weights, dict):
            problems.lines.append(f"`{where}weights` = {shown(weights)}")
            continue
        before = len(problems.lines)
        problems.expect(weights, _WEIGHTS, f"{where}weights.")
        if len(problems.lines) > before:
            continue
        stored = group.get("format") or values.get("format")
        kind = (weights.get("type", "int"), weights.get("num_bits", 8))
        code = _FORMATS.get(stored, {}).get(kind) if isinstance(stored, str) else None
        if code is None:
            problems.lines.append(f"`{where}format` = {shown(stored)} of {kind[1]} bits of type {shown(kind[0])}")
        else:
            yield from _of_group(weights, code, f"{where}weights.", problems)


def _of_group(weights: Values, code: str, where: str, problems: Problems) -> Iterator[Form]:
    """Yield the form of the weights of one group."""
    size, structure = weights.get("group_size"), weights.get("block_structure")
    strategy = weights.get("strategy") or ("tensor" if size is None else "channel" if size == -1 else "group")
    if strategy == "group" and not (type(size) is int and size > 0):
        problems.lines.append(f"`{where}group_size` = {shown(size)} is no size")
        return
    if strategy == "block" and not _is_block(structure):
        problems.lines.append(f"`{where}block_structure` = {shown(structure)} is no pair of sizes")
        return
    block: Block = {
        "tensor": (None, None),
        "channel": (1, None),
        "group": (1, size),
        "block": tuple(structure or (None, None)),
    }[strategy]
    symmetric = weights.get("symmetric", True)
    zeros = ("weight_zero_point",)
    needed, may = (("weight_scale",), zeros) if symmetric else (("weight_scale", *zeros), ())
    text = f"{code.removeprefix('packed ')}, {_in_words(block)}{'' if symmetric else ', with zero points'}"
    if code.startswith("packed"):
        stored = ("weight_packed", *needed, "weight_shape")
        yield Form(text, stored, may, "weight", partial(bind_packed, code, block))
    else:
        yield Form(text, ("weight", *needed), may, "weight", partial(bind_plain, code, block))


def _in_words(block: Block) -> str:
    """Describe the elements that share a scale."""
    high, wide = block
    if wide is None:
        return "one scale each" if high is None else "a scale for each row"
    return f"groups of {wide}" if high == 1 else f"blocks of {high} x {wide}"


# mxfp4

_MXFP4: dict[str, tuple[Any, ...] | None] = {
    "quant_method": None,
    "modules_to_not_convert": None,
    "dequantize": (False, True),
}


def _mxfp4(values: Values, problems: Problems) -> Iterator[Form]:
    problems.expect(values, _MXFP4)
    yield Form("mxfp4, groups of 32", ("_blocks", "_scales"), (), "", bind_mxfp4, transposed=True)


METHODS: dict[str, Callable[[Values, Problems], Iterator[Form]]] = {
    "fp8": _fp8,
    "compressed-tensors": _compressed,
    "mxfp4": _mxfp4,
}
