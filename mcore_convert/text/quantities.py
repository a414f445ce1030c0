"""Amounts for people: `2.47 GB`, `1.24 B`, `0.0195`, `12.3 %`."""

from __future__ import annotations

from collections.abc import Sequence


def in_bytes(count: float) -> str:
    """Format a number of bytes: `2.47 GB`."""
    return f"{count:.0f} B" if count < 1000 else _scaled(count, (" B", " kB", " MB", " GB", " TB"))


def in_parameters(count: float) -> str:
    """Format a number of parameters: `1.24 B`."""
    return _scaled(count, ("", " k", " M", " B", " T"))


def _scaled(count: float, units: Sequence[str]) -> str:
    power = 0
    while count >= 999.5 and power < len(units) - 1:
        count, power = count / 1000, power + 1
    return f"{count:.3g}{units[power]}"


def in_digits(value: float) -> str:
    """Format a number with three significant digits."""
    return "0" if value == 0 else f"{value:.3g}"


def in_range(values: Sequence[float]) -> str:
    """Format the range of values: `0.019 - 0.024`, or one number if both ends look the same."""
    low, high = in_digits(min(values)), in_digits(max(values))
    return low if low == high else f"{low} - {high}"


def in_percent(share: float) -> str:
    """Format a share in percent; a share below 1 is never shown as 100 %."""
    text = f"{100 * share:.3g}"
    return f"{'>99.9' if text == '100' and share < 1 else text} %"
