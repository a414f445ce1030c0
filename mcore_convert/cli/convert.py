"""`mcore-convert convert`."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Unpack

import typer

from mcore_convert.cli import options
from mcore_convert.cli.parameters import Parameter, taking
from mcore_convert.cli.terminal import in_bytes, in_parameters, progress, say, show, table
from mcore_convert.options import ConvertOptions

if TYPE_CHECKING:
    from mcore_convert.api import Conversion


@taking(
    ConvertOptions,
    hf_config=Parameter("hf_config", options.ConfigToKeep),
    tokenizer=Parameter("tokenizer", options.TokenizerName),
)
def command(
    source: Annotated[
        str, typer.Argument(help="Hugging Face or Megatron directory or file, a training run, or a Hub id")
    ],
    destination: Annotated[Path, typer.Argument(help="Directory to make; it appears when it is complete")],
    *,
    json: options.Json = False,
    quiet: options.Quiet = False,
    **given: Unpack[ConvertOptions],
) -> None:
    """Convert a checkpoint into another format.

    Example: mcore-convert convert ./Llama-3.2-1B ./out --tp 2
    """
    from mcore_convert.api import convert

    with progress(quiet=quiet) as update:
        given["progress"] = update
        done = convert(source, destination, **given)
    if json:
        show(jsonlib.dumps(done.as_dict(), indent=2))
    elif not quiet:
        report(done)


def report(done: Conversion) -> None:
    """Show the result or the plan of a conversion in a few lines."""
    from mcore_convert.formats.base import Side

    facts = done.as_dict()
    source, target = facts["source"], facts["target"]
    dims = done.plan.dims
    tied = "tied" if dims.tied else "untied"
    show(f"{facts['family']}  {dims.num_layers} layers  {in_parameters(facts['num_parameters'])} parameters  {tied}")
    rows = [
        ("from", source["format"], source["path"], f"{source['tensors']} tensors", in_bytes(facts["nbytes"])),
        (
            "to",
            target["format"],
            target["path"],
            f"{target['tensors']} {'keys' if done.plan.target.side is Side.MEGATRON else 'tensors'}",
            f"{in_bytes(target['nbytes'])} in {len(target['files'])} file{'s' * (len(target['files']) != 1)}",
        ),
    ]
    for line in table(rows):
        show(line)
    if done.dry_run:
        for name, nbytes in target["files"].items():
            show(f"      {name}  {in_bytes(nbytes)}")
        show(f"memory at most {in_bytes(facts['expected_memory'])}; nothing written (--dry-run)")
    for note in done.notes:
        say(f"note: {note}")
    if done.command and not done.dry_run:
        with_state = any(move.item.state != "param" for move in done.plan.moves)
        what = "with its optimizer state" if with_state else "weights only, for a new optimizer"
        show(f"load it in Megatron-LM ({what}) with")
        show(f"  {done.command}")
