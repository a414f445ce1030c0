"""Tables of values: a line per weight, its layers folded into a range and a row of small bars."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

from mcore_convert.spec.names import PARAM
from mcore_convert.text.grouping import Described, OfWeight, in_layers
from mcore_convert.text.scale import logarithmic

BARS, ASCII_BARS = "▁▂▃▄▅▆▇█", "12345678"
ZERO, ASCII_ZERO = "·", "0"
MOST_BARS = 40  # in deeper models each bar is the highest of some neighbours


def with_headings(
    groups: Sequence[list[Described]], line: Callable[[list[Described]], tuple[str, ...]]
) -> list[tuple[str, ...]]:
    """Return a line per weight, with its name first; those of layers are indented below a heading that names the
    layers.
    """
    rows: list[tuple[str, ...]] = []
    for heading, block in groupby(groups, key=lambda members: _split(members)[0]):
        for number, members in enumerate(block):
            cells = line(members)
            if heading and number == 0:
                rows.append((heading, *("" for _ in cells)))
            rows.append((("  " if heading else "") + _split(members)[1], *cells))
    return rows


def _split(members: Sequence[OfWeight]) -> tuple[str, str]:
    """Return the layers of a weight, as `decoder.layers.{0...31}`, and its name within them."""
    first = members[0]
    name = first.weight.replace("{expert}", _span([m.expert for m in members]))
    name = name if first.state == PARAM else f"{name} ({first.state})"
    name = name.replace("{mtp}.", "{layer}.")
    before, placeholder, after = name.partition("{layer}.")
    return (before + _span([m.layer for m in members]), after) if placeholder else ("", name)


def _span(values: Iterable[int | None]) -> str:
    numbers = sorted({number for number in values if number is not None})
    if not numbers:
        return ""
    return str(numbers[0]) if len(numbers) == 1 else f"{{{numbers[0]}...{numbers[-1]}}}"


def by_layer(members: Iterable[Described], value: Callable[[list[Described]], float]) -> list[float]:
    """Return a value per layer, over all experts in it; an empty list if there are no layers."""
    return [value(of) for of in in_layers(members).values()]


def bars(values: Sequence[float]) -> str:
    """Return values as a row of small bars, on a logarithmic scale that is flat for nearly equal values."""
    if len(values) < 2:
        return ""
    width = -(-len(values) // MOST_BARS)
    highest = [max(values[start : start + width]) for start in range(0, len(values), width)]
    signs, zero = (BARS, ZERO) if _can_show(BARS + ZERO) else (ASCII_BARS, ASCII_ZERO)
    return "".join(signs[step - 1] if step else zero for step in logarithmic(highest, len(signs)))


def _can_show(text: str) -> bool:
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True
