"""The tree of errors for users, and the text of each.

ConvertError
  ConfigError            a configuration that one side cannot represent
  LayoutError            a parallel layout that does not fit the model
  MappingError           weights without a place, places without a weight, shapes that disagree
  UnreadableCheckpoint   a source that is missing, incomplete, damaged or not a checkpoint
    UnsafePickle         a pickle that names a class which is not on the allow-list
  UnwritableTarget       a destination that exists, is being written, or has no room
  VerificationError      two checkpoints that cannot be compared
  HubError               the Hub refuses a request, or cannot be reached
  DataError              texts, training data or a tokenizer that are missing, damaged or not for this model
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

MAX_ITEMS = 20  # lines of a list that an error shows; the others are counted


class ConvertError(Exception):
    """A refusal: what is wrong and where (`message`), the culprits (`items`), and what to do (`hint`)."""

    def __init__(self, message: str, *, items: Iterable[str] = (), hint: str | None = None) -> None:
        self.message = message
        self.items = tuple(items)
        self.hint = hint
        super().__init__(message)

    def __str__(self) -> str:
        lines = [self.message, *(f"  {item}" for item in self.items[:MAX_ITEMS])]
        if len(self.items) > MAX_ITEMS:
            lines.append(f"  ... and {len(self.items) - MAX_ITEMS} more")
        if self.hint:
            lines.append(f"hint: {self.hint}")
        return "\n".join(lines)


class ConfigError(ConvertError):
    """A configuration, or one of its values, that the other side cannot represent."""


class LayoutError(ConvertError):
    """A parallel layout that does not fit the model."""


class MappingError(ConvertError):
    """Weights of a checkpoint that are not those of the family."""


class UnreadableCheckpoint(ConvertError):
    """A source that is missing, incomplete, damaged, or not a checkpoint at all."""


class UnsafePickle(UnreadableCheckpoint):
    """A pickle that names a class or function which the restricted reader does not allow."""


class UnwritableTarget(ConvertError):
    """A destination that exists, is being written by someone else, or has no room."""


class VerificationError(ConvertError):
    """Two checkpoints that cannot be compared."""


class HubError(ConvertError):
    """A request that the Hub refuses, or a Hub that cannot be reached."""


class DataError(ConvertError):
    """Texts, training data or a tokenizer that are missing, damaged, or not for this model."""


def counted(number: int, one: str, many: str) -> str:
    """Return a number with the words that agree with it: `1 key has`, `2 keys have`."""
    return f"{number} {one if number == 1 else many}"


def fold(keys: Iterable[str]) -> list[str]:
    """Return keys with those folded that differ in one index only: `h.{0...31}.ln_1.weight`, by first appearance."""
    lines = list(dict.fromkeys(keys))
    for _ in range(2):  # layers, then experts
        groups: dict[str, list[tuple[int, str]]] = {}
        for line in lines:
            match = re.search(r"(?<=\.)\d{1,18}(?=\.)|(?<=\.)\d{1,18}$", line)  # longer numbers are not indices
            template = line if match is None else f"{line[: match.start()]}\0{line[match.end() :]}"
            groups.setdefault(template, []).append((0 if match is None else int(match[0]), line))
        lines = [_folded(template, members) for template, members in groups.items()]
    return lines


def _folded(template: str, members: Sequence[tuple[int, str]]) -> str:
    if len(members) == 1:
        return members[0][1]
    indices = sorted(index for index, _ in members)
    whole = indices == list(range(indices[0], indices[-1] + 1))
    shown = f"{indices[0]}...{indices[-1]}" if whole else ",".join(map(str, indices))
    return template.replace("\0", f"{{{shown}}}")


def ranged(numbers: Sequence[int]) -> str:
    """Return ascending numbers in words: `3`, `3-5, 9`."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
