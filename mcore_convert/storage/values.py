"""Elements as numbers: the values of bit patterns, and rounding from one dtype to another as torch does."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcore_convert.storage.views import DTYPE_SIZES

Bytes = NDArray[Any]


def as_float(array: Bytes, dtype: str) -> NDArray[np.float64]:
    """Return the values of elements that were read as unsigned integers."""
    if dtype in FP8:
        return FP8[dtype][array]
    with np.errstate(invalid="ignore"):  # a signalling NaN becomes a quiet one
        if dtype == "bfloat16":
            return (array.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        return np.ascontiguousarray(array).view(dtype).astype(np.float64)


def _exponents() -> NDArray[np.float64]:
    """Return the value of every byte as the exponent of a power of two, the scale of OCP's microscaling formats."""
    values = np.ldexp(1.0, np.arange(256) - 127)
    values[255] = np.nan
    return values


def _float8(exponent_bits: int, *, finite: bool) -> NDArray[np.float64]:
    """Return the value of every byte. `finite` floats have no infinity, and NaN only where all bits are set."""
    mantissa_bits = 7 - exponent_bits
    bias = 2 ** (exponent_bits - 1) - 1
    byte = np.arange(256)
    exponent, mantissa = (byte & 0x7F) >> mantissa_bits, byte & (2**mantissa_bits - 1)
    normal = np.ldexp(1 + mantissa / 2**mantissa_bits, exponent - bias)
    values = np.where(exponent == 0, np.ldexp(mantissa / 2**mantissa_bits, 1 - bias), normal)
    if finite:
        values[byte & 0x7F == 0x7F] = np.nan
    else:
        top = exponent == 2**exponent_bits - 1
        values[top] = np.where(mantissa[top] == 0, np.inf, np.nan)
    signed: NDArray[np.float64] = np.where(byte & 0x80, -values, values)
    return signed


FP8 = {
    "float8_e4m3fn": _float8(4, finite=True),
    "float8_e5m2": _float8(5, finite=False),
    "float8_e8m0fnu": _exponents(),
}


# The fp32 bits, without the sign, of the least number that rounds to infinity: half a step above the largest finite.
INFINITE_FROM = {"bfloat16": 0x7F7F8000, "float16": 0x477FF000}
INFINITY = 0x7F800000  # in fp32; bits above are NaN


def round_to(array: Bytes, dtype: str) -> Bytes:
    """Round fp32 values, as unsigned integers, to the nearest of a dtype, ties to even, as torch does."""
    bits = np.ascontiguousarray(array)
    if dtype == "bfloat16":
        raised: Bytes = bits >> 16  # in place: another array would cost as much as the rounding
        raised &= 1
        raised += 0x7FFF
        raised += bits
        raised >>= 16
        nearest: Bytes = raised.astype(np.uint16)
        no_number = (bits & 0x7FFFFFFF) > INFINITY
        if no_number.any():  # the payload of a NaN could round up to a number
            nearest[no_number] = bits[no_number] >> 16 | 0x40
        return nearest
    with np.errstate(over="ignore"):
        rounded: Bytes = bits.view(np.float32).astype(dtype).view(f"u{DTYPE_SIZES[dtype]}")
    return rounded


def cast(array: Bytes, source: str, target: str) -> Bytes:
    """Convert floating-point elements to another dtype, both as unsigned integers, rounded as torch does.

    Raises:
        OverflowError: a number is beyond the largest of the target, and would become infinite.
    """
    if source == target:
        return array
    if source == "bfloat16":
        exact: Bytes = array.astype(np.uint32) << 16
    elif source == "float16":
        exact = np.ascontiguousarray(array).view(np.float16).astype(np.float32).view(np.uint32)
    else:
        exact = array
    if target == "float32":
        return exact
    sizes = exact & 0x7FFFFFFF
    beyond = INFINITE_FROM[target]
    if sizes.max(initial=0) >= beyond and ((sizes >= beyond) & (sizes < INFINITY)).any():
        raise OverflowError(f"a number beyond the largest of {target}")
    return round_to(exact, target)
