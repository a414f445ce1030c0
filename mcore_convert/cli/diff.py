"""`mcore-convert diff`."""

from __future__ import annotations

import json as jsonlib
from typing import TYPE_CHECKING, Annotated, Unpack

import typer

from mcore_convert.cli import options
from mcore_convert.cli.parameters import taking
from mcore_convert.cli.terminal import progress, say, show, table
from mcore_convert.cli.value_tables import bars, by_layer, with_headings
from mcore_convert.errors import fold
from mcore_convert.options import ModelOptions
from mcore_convert.text.grouping import folded
from mcore_convert.text.quantities import in_bytes, in_digits, in_percent

if TYPE_CHECKING:
    from mcore_convert.comparison.change import Change
    from mcore_convert.comparison.distance import Compared, Comparison


@taking(ModelOptions)
def command(
    a: Annotated[str, typer.Argument(help="A checkpoint, in any format")],
    b: Annotated[str, typer.Argument(help="The later one, in any format")],
    *,
    top: Annotated[int, typer.Option(min=0, metavar="N", help="Also list the N tensors that changed most")] = 0,
    optimizer: Annotated[bool, typer.Option("--optimizer", help="Include optimizer state")] = False,
    json: options.Json = False,
    html: options.Html = None,
    quiet: options.Quiet = False,
    **given: Unpack[ModelOptions],
) -> None:
    """Report what changed between two checkpoints, weight by weight.

    Exit code 0: equal; 1: different; 2: they cannot be compared.

    Example: mcore-convert diff ./Llama-3.2-1B ./checkpoints --top 5
    """
    from mcore_convert.api import diff

    with progress(quiet=quiet) as update:
        result = diff(a, b, optimizer=optimizer, html=html, progress=update, **given)
    if json:
        show(jsonlib.dumps(result.as_dict(), indent=2))
    elif not quiet:
        report(result, top)
    if html is not None and not quiet:
        say(f"page written to {html}")
    if not result.equal:
        raise typer.Exit(1)


def report(result: Comparison, top: int) -> None:
    """Show the result in a few lines, then a line per weight."""
    for note in result.notes:
        say(f"note: {note}")
    changed = f"{result.num_changed} of {len(result.changes)} changed, {in_bytes(result.nbytes)} read"
    facts = [("a", _about(result.a)), ("b", _about(result.b)), ("weights", changed)]
    if result.num_changed:
        facts.append(
            ("elements", f"{in_percent(result.share)} changed, |b - a| is {in_digits(result.relative)} of |a|")
        )
    for line in table(facts):
        show(line)
    for name, only in (("a", result.only_in_a), ("b", result.only_in_b)):
        if only:
            show(f"only in {name}")
            for line in fold(only):
                show(f"  {line}")
    if result.config_differences:
        show("config")
        for line in result.config_differences:
            show(f"  {line}")
    if result.num_changed:
        show()
        for line in table(changes_by_weight(result), right=(1, 2, 3)):
            show(line)
    if top and result.num_changed:
        show()
        for line in table(most_changed(result, top), right=(1, 2, 3, 4)):
            show(line)


def _about(side: Compared) -> str:
    parts = [side.format, side.family or "", "" if side.iteration is None else f"iteration {side.iteration}"]
    return f"{side.path}  {', '.join(filter(None, parts))}"


def changes_by_weight(result: Comparison) -> list[tuple[str, ...]]:
    """Return a line per weight, its layers folded, in the order of the forward pass."""
    from mcore_convert.comparison.change import total_relative

    bad = any(sum(change.num_bad) for change in result.changes)

    def line(members: list[Change]) -> tuple[str, ...]:
        bad_a, bad_b = (sum(counts) for counts in zip(*(c.num_bad for c in members), strict=True))
        changed, numel = sum(c.num_changed for c in members), sum(c.numel for c in members)
        worst = max(members, key=lambda change: change.largest)
        return (
            in_percent(changed / numel if numel else 0.0),
            in_digits(total_relative(members)),
            in_digits(worst.largest),
            _place(worst),
            *([f"{bad_a} -> {bad_b}" if bad_a or bad_b else ""] if bad else []),
            bars(by_layer(members, total_relative)),
        )

    columns = ("changed", "relative", "largest", "at", *(["NaN, inf"] if bad else []), "relative by layer")
    return [("weight", *columns), *with_headings(folded(result.changes), line)]


def most_changed(result: Comparison, count: int) -> list[tuple[str, ...]]:
    """Return a line per tensor for those that changed most."""
    from mcore_convert.comparison.change import in_words

    head = ("most changed", "changed", "relative", "cosine", "largest", "at", "from", "to")
    return [head, *((change.name, *in_words(change).values()) for change in result.most_changed(count))]


def _place(change: Change) -> str:
    if change.largest_at is None:
        return ""
    layer = "" if change.layer is None else f"layer {change.layer} "
    expert = "" if change.expert is None else f"expert {change.expert} "
    return f"{layer}{expert}{list(change.largest_at)}"
