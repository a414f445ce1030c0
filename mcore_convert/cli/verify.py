"""`mcore-convert verify`."""

from __future__ import annotations

import json as jsonlib
from typing import TYPE_CHECKING, Annotated, Unpack

import typer

from mcore_convert.cli import options
from mcore_convert.cli.parameters import PARAMETERS, taking
from mcore_convert.cli.terminal import in_bytes, progress, say, show, show_items, table
from mcore_convert.errors import MAX_ITEMS
from mcore_convert.options import ModelOptions

if TYPE_CHECKING:
    from mcore_convert.comparison.equality import Difference, Verification
    from mcore_convert.comparison.integrity import Integrity


@taking(ModelOptions)
def command(
    a: Annotated[str, typer.Argument(help="A checkpoint, in any format")],
    b: Annotated[
        str | None, typer.Argument(help="Another one, in any format; without it A is checked against its manifest")
    ] = None,
    *,
    logits: Annotated[
        bool, typer.Option("--logits", help="Also run both in fp32 on the CPU and compare the logits")
    ] = False,
    tolerance: Annotated[
        float | None,
        typer.Option(min=0, metavar="SHARE", help="Allowed difference of logits, as a share of the largest"),
    ] = None,
    allow_loss: Annotated[
        bool,
        typer.Option("--allow-loss", help="Exit with 0 where weights differ by no more than quantisation loses"),
    ] = False,
    json: options.Json = False,
    quiet: Annotated[
        bool,
        typer.Option("--quiet", "-q", rich_help_panel=options.OUTPUT, help="Print nothing, only set the exit code"),
    ] = False,
    **given: Unpack[ModelOptions],
) -> None:
    """Compare two checkpoints bit for bit, as global tensors, or the files of one with its manifest.

    Exit code 0: equal; 1: different; 2: they cannot be compared.

    Example: mcore-convert verify ./Llama-3.2-1B ./out --logits
    """
    from mcore_convert.api import verify, verify_files

    if b is None:
        idle = {"logits": logits, "allow_loss": allow_loss, "tolerance": tolerance, **given}
        words = [PARAMETERS[name].name if name in PARAMETERS else name for name, value in idle.items() if value]
        if words:
            flags = " and ".join(f"--{word.replace('_', '-')}" for word in words)
            raise typer.BadParameter("they are for two checkpoints", param_hint=flags)
        with progress(quiet=quiet) as update:
            intact = verify_files(a, progress=update)
        if json:
            show(jsonlib.dumps(integrity_as_dict(intact), indent=2))
        elif not quiet:
            report_integrity(intact)
        if not intact.intact:
            raise typer.Exit(1)
        return
    with progress(quiet=quiet) as update:
        result = verify(a, b, logits=logits, tolerance=tolerance, progress=update, **given)
    if json:
        show(jsonlib.dumps(as_dict(result), indent=2))
    elif not quiet:
        report(result)
    if not (result.equal or (allow_loss and result.within_loss)):
        raise typer.Exit(1)


def as_dict(result: Verification) -> dict[str, object]:
    """Return plain values for JSON."""
    return {
        "equal": result.equal,
        "within_loss": result.within_loss,
        "family": result.family,
        "num_weights": result.num_weights,
        "nbytes": result.nbytes,
        "config_differences": list(result.config_differences),
        "differences": [vars(difference) for difference in result.differences],
        "logits": None if result.logits is None else {**vars(result.logits), "within": result.logits.within},
        "notes": list(result.notes),
    }


def report(result: Verification) -> None:
    """Show the result in a few lines, and a table of the weights that differ."""
    for note in result.notes:
        say(f"note: {note}")
    same = result.num_weights - len(result.differences)
    show(f"weights  {same} of {result.num_weights} bit-equal, {in_bytes(result.nbytes)} compared")
    if result.differences:
        rows = [("weight", "elements", "largest difference", "dtype", *([""] if result.with_loss else []))]
        for difference in result.differences[:MAX_ITEMS]:
            mine, theirs = difference.dtypes
            dtype = mine if mine == theirs else f"{mine} and {theirs}"
            cells = (difference.name, str(difference.num_elements), f"{difference.largest:.3g}", dtype)
            rows.append((*cells, *([_judged(difference)] if result.with_loss else [])))
        for line in table(rows, right=(1, 2)):
            show(f"  {line}")
        if len(result.differences) > MAX_ITEMS:
            show(f"  ... and {len(result.differences) - MAX_ITEMS} more")
    if result.config_differences:
        show("config   different")
        for line in result.config_differences:
            show(f"  {line}")
    else:
        show("config   means the same")
    if result.logits is not None:
        logits = result.logits
        verdict = "within" if logits.within else "beyond"
        show(
            f"logits   differ by at most {logits.difference:.2g}, {verdict} the tolerance of {logits.tolerance:.2g} "
            f"({logits.num_tokens} tokens, largest logit {logits.largest_logit:.3g}, fp32)"
        )
    if result.within_loss and not result.equal:
        show("different, by no more than quantisation loses")
    else:
        show("equal" if result.equal else "different")


def _judged(difference: Difference) -> str:
    return "within the loss" if difference.is_loss else "beyond it"


def integrity_as_dict(result: Integrity) -> dict[str, object]:
    """Return plain values for JSON."""
    facts = {name: value for name, value in vars(result).items() if name not in ("path", "damages")}
    return {
        "intact": result.intact,
        "path": str(result.path),
        **facts,
        "damages": [vars(damage) for damage in result.damages],
    }


def report_integrity(result: Integrity) -> None:
    """Show the result of a check against the manifest in a few lines."""
    what = f"{result.num_files} files, {result.num_tensors} tensors"
    show(f"{result.path}  {what}, {in_bytes(result.nbytes)} read, written by mcore-convert {result.version}")
    if not result.has_checksums:
        say("note: the manifest has no checksums (--no-checksums): only sizes were compared")
    if result.unlisted:
        more = f" and {len(result.unlisted) - MAX_ITEMS} more" if len(result.unlisted) > MAX_ITEMS else ""
        say(f"note: not in the manifest: {', '.join(result.unlisted[:MAX_ITEMS])}{more}")
    show_items([*result.absent, *map(str, result.damages)])
    show("intact" if result.intact else "different")
