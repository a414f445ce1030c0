"""The forms to which weights can be quantised while writing, and the `quantization_config` of each.

They can also be read: a written directory follows one of the `schemes`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from mcore_convert.errors import ConfigError
from mcore_convert.formats.hf.forms import Form, bind_packed, bind_plain
from mcore_convert.spec.family import Weight
from mcore_convert.spec.shard import Shape
from mcore_convert.storage.codecs import Quantised
from mcore_convert.storage.views import TensorMeta, View

BLOCK = 128
GROUP = 32


@dataclass(frozen=True)
class Encoding:
    """One form to quantise to.

    `loss` describes the largest error, `fitting` the matrices that programs can read in this form, and `fits` decides
    whether a shape is one. `metas` returns the stored tensors by the suffixes of their names, and `settings` the
    configuration for the modules that are not quantised.
    """

    form: Form
    method: str
    loss: str
    fitting: str
    fits: Callable[[Shape], bool]
    metas: Callable[[Shape, str], dict[str, TensorMeta]]
    settings: Callable[[list[str]], dict[str, Any]]

    def takes(self, weight: Weight, name: str, shape: Shape, *, turned: bool) -> bool:
        """Return whether a tensor is quantised: only the matrices of linear layers that are sharded over ranks."""
        linear = weight.shard.dim is not None and not weight.vocab and not turned
        return linear and len(shape) == 2 and name.endswith(".weight") and self.fits(shape)

    def stored(self, name: str, meta: TensorMeta) -> dict[str, TensorMeta]:
        """Return the stored tensors of a weight."""
        base = name.removesuffix(self.form.name)
        return {f"{base}{end}": each for end, each in self.metas(meta.shape, meta.dtype).items()}

    def views(self, stored: Mapping[str, View], coded: Mapping[str, TensorMeta]) -> tuple[dict[str, View], Quantised]:
        """Return the tensors of a directory by name, some of them coded."""
        views = dict(stored)
        nbytes = 0
        for name, meta in coded.items():
            names = tuple(self.stored(name, meta))
            nbytes += sum(stored[each].nbytes for each in names)
            blocks = self.form.bind(names, tuple(stored[each] for each in names))
            for each in names:
                del views[each]
            views[name] = View.decoded(blocks, meta.dtype)
        decoded = sum(meta.nbytes for meta in coded.values())
        dtype = next(iter(coded.values())).dtype
        return views, Quantised(self.method, (self.form.text,), len(coded), nbytes, decoded, dtype, self.loss)

    def literals(self, name: str, shape: Shape) -> dict[str, bytes]:
        """Return the stored tensors that are known before the values, by name."""
        ends = [end for end in self.form.stored if end.endswith("_shape")]
        return {f"{name.removesuffix(self.form.name)}{end}": struct.pack("<2q", *shape) for end in ends}


def encoding(name: str) -> Encoding:
    """Return the form of this name.

    Raises:
        ConfigError: it is unknown.
    """
    if name not in ENCODINGS:
        raise ConfigError(f"weights are not quantised to `{name}`", hint=f"known are {', '.join(ENCODINGS)}")
    return ENCODINGS[name]


def _fp8_metas(shape: Shape, dtype: str) -> dict[str, TensorMeta]:
    grid = tuple(-(-size // BLOCK) for size in shape)
    return {"": TensorMeta(shape, "float8_e4m3fn"), "_scale_inv": TensorMeta(grid, "float32")}


def _int4_metas(shape: Shape, dtype: str) -> dict[str, TensorMeta]:
    rows, columns = shape
    scales = dtype if dtype == "bfloat16" else "float32"
    return {
        "weight_packed": TensorMeta((rows, columns // 8), "int32"),
        "weight_scale": TensorMeta((rows, columns // GROUP), scales),
        "weight_shape": TensorMeta((2,), "int64"),
    }


def _fp8_settings(left: list[str]) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": left,
    }


def _int4_settings(left: list[str]) -> dict[str, Any]:
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": GROUP,
        "dynamic": False,
        "actorder": None,
        "block_structure": None,
        "observer": "minmax",
        "observer_kwargs": {},
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": left,
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


ENCODINGS = {
    # transformers 5.23 computes the block size from the shapes of weights and scales: a size larger than a block, and
    # not divisible by it, would be read with other blocks
    "fp8-block": Encoding(
        Form(
            f"float8_e4m3fn, blocks of {BLOCK} x {BLOCK}",
            ("", "_scale_inv"),
            (),
            "",
            partial(bind_plain, "float8_e4m3fn", (BLOCK, BLOCK)),
        ),
        "fp8",
        "at most 1/16 of a value, or 1/458,752 of the largest in its block",
        f"linear layers whose sizes are multiples of {BLOCK}, or smaller, can be",
        lambda shape: all(size % BLOCK == 0 or size < BLOCK for size in shape),
        _fp8_metas,
        _fp8_settings,
    ),
    "int4": Encoding(
        Form(
            f"int4, groups of {GROUP}",
            ("weight_packed", "weight_scale", "weight_shape"),
            (),
            "weight",
            partial(bind_packed, "packed int4", (1, GROUP)),
        ),
        "compressed-tensors",
        "at most 1/14 of the largest value in its group",
        f"linear layers whose inputs are a multiple of {GROUP}, and more, can be",
        lambda shape: shape[1] % GROUP == 0 and shape[1] > GROUP,
        _int4_metas,
        _int4_settings,
    ),
}
