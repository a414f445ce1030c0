"""`mcore-convert families`."""

from __future__ import annotations

import json as jsonlib
from typing import TYPE_CHECKING, Annotated

import typer

from mcore_convert.cli import completion, options
from mcore_convert.cli.parameters import taking
from mcore_convert.cli.terminal import show, table
from mcore_convert.spec.shard import COLUMN, GATED_COLUMN, REPLICATED, ROW

if TYPE_CHECKING:
    from mcore_convert.spec.family import Family, Weight

CUTS = {REPLICATED: "replicated", COLUMN: "column", ROW: "row", GATED_COLUMN: "gated_column"}


@taking()
def command(
    name: Annotated[
        str | None, typer.Argument(autocompletion=completion.families, help="Show the rows of this family")
    ] = None,
    json: options.Json = False,
) -> None:
    """List the model families, or the rows of one.

    Example: mcore-convert families llama
    """
    from mcore_convert.checkpoints.families import families, named

    chosen = [named(name)] if name else list(families().values())
    if json:
        show(jsonlib.dumps({family.name: as_dict(family) for family in chosen}, indent=2))
    elif name:
        for line in table([row(weight) for weight in chosen[0].weights]):
            show(line)
    else:
        for line in table([(family.name, ", ".join(family.architectures)) for family in chosen]):
            show(line)


def row(weight: Weight) -> tuple[str, str, str, str]:
    """Return the cells of a row: its shard, its Megatron name, its shape, its Hugging Face names."""
    return (cut_of(weight), weight.mcore or "-", " ".join(weight.shape), ", ".join(weight.hf))


def cut_of(weight: Weight) -> str:
    """Return the function that constructs the row in the family's file."""
    if weight.mcore is None:
        return "must_be_zero" if weight.copy_of is None else "copy"
    return "vocab" if weight.vocab else CUTS.get(weight.shard, "segmented")


def as_dict(family: Family) -> dict[str, object]:
    """Return plain values for JSON."""
    weights = [dict(zip(("cut", "megatron", "shape", "hf"), row(weight), strict=True)) for weight in family.weights]
    return {"architectures": list(family.architectures), "weights": weights}
