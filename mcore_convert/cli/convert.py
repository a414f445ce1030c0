"""`mcore-convert convert`."""

from __future__ import annotations

import json as jsonlib
import re
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mcore_convert.cli.text import in_bytes, in_parameters, progress, say, show, table

if TYPE_CHECKING:
    from mcore_convert.api import Conversion

SIZES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


class Format(StrEnum):
    """The formats that can be written."""

    hf = "hf"
    torch_dist = "torch_dist"


def size(text: str) -> int:
    """A number of bytes from `5GB`, `500MB`, `2GiB` or a plain number."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if found is None or found[2].upper() not in SIZES or not float(found[1]):
        raise typer.BadParameter(f"`{text}` is not a size; write 5GB, 500MB or 2GiB")
    return int(float(found[1]) * SIZES[found[2].upper()])


def command(
    source: Annotated[str, typer.Argument(help="Hugging Face or Megatron directory, or a Hub id")],
    destination: Annotated[Path, typer.Argument(help="Directory to make; it appears when it is complete")],
    to: Annotated[Format | None, typer.Option(help="Format to write; the other one unless given")] = None,
    tp: Annotated[
        int,
        typer.Option(
            min=1, help="Tensor-parallel size to cut chunks and pad the vocabulary for; any size can load them"
        ),
    ] = 1,
    pp: Annotated[
        int, typer.Option(min=1, help="Pipeline-parallel size for the stored arguments and the printed command line")
    ] = 1,
    iteration: Annotated[
        int | None, typer.Option(min=0, help="Write iter_* with this number instead of release")
    ] = None,
    family: Annotated[str | None, typer.Option(help="Model family, where it is not to be found")] = None,
    hf_config: Annotated[
        Path | None, typer.Option(help="Original config.json to keep, but for what the checkpoint proves different")
    ] = None,
    vocab_size: Annotated[
        int | None, typer.Option(min=1, help="True vocabulary of a Megatron checkpoint that does not store it")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="What --tokenizer-model shall name in the stored arguments")
    ] = None,
    max_shard_size: Annotated[int, typer.Option(parser=size, metavar="SIZE", help="Largest safetensors file")] = "5GB",  # type: ignore[assignment]
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub id")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a destination that exists")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Plan and prove, write nothing")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only")] = False,
) -> None:
    """Convert a checkpoint into another format.

    Example: mcore-convert convert ./Llama-3.2-1B ./out --tp 2
    """
    from mcore_convert.api import convert

    with progress(quiet=quiet) as update:
        done = convert(
            source,
            destination,
            to=to.value if to else None,
            tp=tp,
            pp=pp,
            iteration=iteration,
            family=family,
            hf_config=hf_config,
            vocab_size=vocab_size,
            tokenizer=tokenizer,
            max_shard_size=max_shard_size,
            revision=revision,
            overwrite=overwrite,
            dry_run=dry_run,
            progress=update,
        )
    if json:
        show(jsonlib.dumps(done.as_dict(), indent=2))
    elif not quiet:
        report(done)


def report(done: Conversion) -> None:
    """What was done, or would be, in a few lines."""
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
            f"{target['tensors']} {'tensors' if target['format'] == 'hf' else 'keys'}",
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
        show("load it in Megatron-LM with")
        show(f"  {done.command}")
