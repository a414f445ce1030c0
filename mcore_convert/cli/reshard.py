"""`mcore-convert reshard`."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import Annotated, Unpack

import typer

from mcore_convert.cli import options
from mcore_convert.cli.convert import report
from mcore_convert.cli.parameters import Parameter, taking
from mcore_convert.cli.terminal import progress, show
from mcore_convert.options import ConvertOptions


@taking(
    ConvertOptions,
    without=("family", "hf_config", "tokenizer", "revision", "stream"),
    to=Parameter("to", options.ToMegatron),
)
def command(
    source: Annotated[Path, typer.Argument(help="Megatron directory, or a training run")],
    destination: Annotated[Path, typer.Argument(help="Directory to make; it appears when it is complete")],
    *,
    json: options.Json = False,
    quiet: options.Quiet = False,
    **given: Unpack[ConvertOptions],
) -> None:
    """Move a Megatron checkpoint to another layout, with its optimizer state.

    Example: mcore-convert reshard ./tp2pp2 ./tp1 --tp 1 --pp 1
    """
    from mcore_convert.api import reshard

    with progress(quiet=quiet) as update:
        given["progress"] = update
        done = reshard(source, destination, **given)
    if json:
        show(jsonlib.dumps(done.as_dict(), indent=2))
    elif not quiet:
        report(done)
