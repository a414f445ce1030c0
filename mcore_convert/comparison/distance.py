"""The distance of two checkpoints, weight by weight, in any two formats and layouts. Each is read once, in blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mcore_convert.checkpoints.contents import Contents, Tensor, paired
from mcore_convert.comparison.change import Change, change_of, finite, gaps_between, total_relative
from mcore_convert.comparison.equality import config_differences, sizes_of
from mcore_convert.errors import VerificationError
from mcore_convert.formats.base import Side
from mcore_convert.storage.elements import Files
from mcore_convert.storage.phases import phase
from mcore_convert.storage.progress import Meter, Progress

MAY_DIFFER = ("tied", "qkv_bias", "linear_bias")  # sizes that decide which weights exist, not their shapes


@dataclass(frozen=True)
class Compared:
    """One of the two checkpoints. `family` is None where its family is unknown."""

    path: str
    format: str
    family: str | None
    iteration: int | None


@dataclass(frozen=True)
class Comparison:
    """Comparison of two checkpoints: `changes` weight by weight, in the order of the forward pass.

    `only_in_a` and `only_in_b` name the tensors that the other side lacks; `nbytes` were read.
    """

    a: Compared
    b: Compared
    changes: tuple[Change, ...]
    only_in_a: tuple[str, ...]
    only_in_b: tuple[str, ...]
    config_differences: tuple[str, ...]
    nbytes: int
    notes: tuple[str, ...] = ()

    @property
    def num_changed(self) -> int:
        """Number of tensors with a changed element."""
        return sum(change.num_changed > 0 for change in self.changes)

    @property
    def equal(self) -> bool:
        """Whether nothing changed: both sides have the same tensors, elements and configuration."""
        return not (self.num_changed or self.only_in_a or self.only_in_b or self.config_differences)

    @property
    def relative(self) -> float:
        """Norm of all differences over that of all of a."""
        return total_relative(self.changes)

    @property
    def share(self) -> float:
        """Share of all elements that changed."""
        numel = sum(change.numel for change in self.changes)
        return sum(change.num_changed for change in self.changes) / numel if numel else 0.0

    def most_changed(self, count: int) -> list[Change]:
        """Return the most changed tensors: first those with new NaN or infinities, then by relative norm and share."""
        changed = [change for change in self.changes if change.num_changed]
        return sorted(changed, key=lambda c: (c.num_bad[0] >= c.num_bad[1], -c.relative, -c.share))[:count]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "equal": self.equal,
            "a": asdict(self.a),
            "b": asdict(self.b),
            "relative": finite(self.relative),
            "share": self.share,
            "num_changed": self.num_changed,
            "num_weights": len(self.changes),
            "changes": [change.as_dict() for change in self.changes],
            "only_in_a": list(self.only_in_a),
            "only_in_b": list(self.only_in_b),
            "config_differences": list(self.config_differences),
            "nbytes": self.nbytes,
            "notes": list(self.notes),
        }


def compare_contents(a: Contents, b: Contents, *, progress: Progress | None = None) -> Comparison:
    """Read both checkpoints once and return their distance.

    Raises:
        VerificationError: they are different models.
        UnreadableCheckpoint: a file is shorter than its header says.
    """
    _refuse_other_models(a, b)
    pairs, only_a, only_b = paired(a, b)
    nbytes = sum(x.nbytes + y.nbytes for x, y in pairs)
    with phase(progress, "comparing", nbytes), Files() as files:
        meter = Meter(nbytes, progress)
        gaps = gaps_between(((x.slots, y.slots) for x, y in pairs), files, meter)
        only = tuple(_names_of_one_side(side, files) for side in (only_a, only_b))
    models = [side.model for side in (a, b) if side.model is not None]
    return Comparison(
        _side(a),
        _side(b),
        tuple(change_of(x, y, gap) for (x, y), gap in zip(pairs, gaps, strict=True)),
        only[0],
        only[1],
        tuple(config_differences(*models)) if len(models) == 2 else (),
        nbytes,
        tuple(dict.fromkeys(note for model in models for note in model.notes)),
    )


def _refuse_other_models(a: Contents, b: Contents) -> None:
    if a.model is None or b.model is None:
        if (a.model is None) != (b.model is None):
            known, unknown = (b, a) if a.model is None else (a, b)
            name = known.model.family.name if known.model else ""
            error = unknown.error
            raise VerificationError(
                f"`{unknown.checkpoint.path}` is no `{name}`, and of no family that is known",
                items=() if error is None else (error.message, *error.items),
                hint=None if error is None else error.hint,
            )
        return
    both_megatron = all(each.checkpoint.side is Side.MEGATRON for each in (a, b))
    if not both_megatron and a.model.family.name != b.model.family.name:
        raise VerificationError(f"a `{a.model.family.name}` cannot be compared with a `{b.model.family.name}`")
    mine, theirs = sizes_of(a.model), sizes_of(b.model)
    items = [f"{n}: {mine[n]} and {theirs[n]}" for n in mine if mine[n] != theirs[n] and n not in MAY_DIFFER]
    if items:
        raise VerificationError("the models have different sizes", items=items)


def _side(contents: Contents) -> Compared:
    checkpoint, model = contents.checkpoint, contents.model
    return Compared(
        str(checkpoint.path),
        checkpoint.format,
        model.family.name if model else None,
        checkpoint.common.iteration,
    )


def _names_of_one_side(tensors: Sequence[Tensor], files: Files) -> tuple[str, ...]:
    """Return the names of tensors that the other side lacks, except those that must be zero and are."""
    gaps = gaps_between((((), () if t.required else t.slots) for t in tensors), files, Meter(0, None), norms=False)
    return tuple(t.name for t, gap in zip(tensors, gaps, strict=True) if t.required or gap.num_changed)
