"""Options that several commands share: layouts, sizes, and arguments given by hand."""

from __future__ import annotations

import json
import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

SIZES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


class Format(StrEnum):
    """The formats that can be written."""

    hf = "hf"
    torch_dist = "torch_dist"
    torch = "torch"


class MegatronFormat(StrEnum):
    """The formats of Megatron."""

    torch_dist = "torch_dist"
    torch = "torch"


class Implementation(StrEnum):
    """The layer specs whose names the format `torch` can have."""

    local = "local"
    transformer_engine = "transformer_engine"


def size(text: str) -> int:
    """A number of bytes from `5GB`, `500MB`, `2GiB` or a plain number."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if found is None or found[2].upper() not in SIZES or not float(found[1]):
        raise typer.BadParameter(f"`{text}` is not a size; write 5GB, 500MB or 2GiB")
    return int(float(found[1]) * SIZES[found[2].upper()])


def arguments(texts: list[str] | None) -> dict[str, Any]:
    """Megatron arguments from `NAME=VALUE`; a value is read as JSON where it is JSON."""
    found: dict[str, Any] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals:
            raise typer.BadParameter(f"`{text}` is not NAME=VALUE", param_hint="--arg")
        name = name.strip().removeprefix("--").replace("-", "_")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def page_name(path: Path | None) -> Path | None:
    """A page is called so: a slip must not replace a file of another kind."""
    if path is not None and path.suffix.lower() not in (".html", ".htm"):
        raise typer.BadParameter(f"`{path}` is no name of a page; call it `{path.name}.html`")
    return path


Tp = Annotated[int, typer.Option(min=1, help="Tensor-parallel size")]
Pp = Annotated[int, typer.Option(min=1, help="Pipeline-parallel size")]
Vpp = Annotated[int | None, typer.Option(min=1, help="Virtual pipeline stages on each pipeline rank")]
Ep = Annotated[int, typer.Option(min=1, help="Expert-parallel size")]
FirstStage = Annotated[int | None, typer.Option(min=0, help="Layers on the first pipeline stage")]
LastStage = Annotated[int | None, typer.Option(min=0, help="Layers on the last pipeline stage")]
PipelineLayout = Annotated[str | None, typer.Option(help="Stages spelled out, as --pipeline-model-parallel-layout")]
NoOptimizer = Annotated[bool, typer.Option("--no-optimizer", help="Leave optimizer state behind")]
AllowDrift = Annotated[
    bool, typer.Option("--allow-drift", help="Take the first rank's copy where ranks hold slightly different ones")
]
Names = Annotated[Implementation | None, typer.Option(help="Layer spec whose names a Megatron format shall have")]
ForMegatron = Annotated[
    str | None,
    typer.Option(metavar="VERSION", help="Megatron-LM that will load it; that which wrote the source unless given"),
]
Iteration = Annotated[int | None, typer.Option(min=0, help="Number of the iter_* directory to write")]
VocabSize = Annotated[
    int | None, typer.Option(min=1, help="True vocabulary of a Megatron checkpoint that does not store it")
]
Given = Annotated[
    list[str] | None,
    typer.Option("--arg", metavar="NAME=VALUE", help="Megatron argument that an old checkpoint does not store"),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a destination that exists")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Plan and prove, write nothing")]
Html = Annotated[
    Path | None, typer.Option(metavar="FILE.html", callback=page_name, help="Also write one self-contained page")
]
Json = Annotated[bool, typer.Option("--json", help="Print the summary as JSON")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only")]
Private = Annotated[bool, typer.Option("--private", help="Make a new repository private")]
Branch = Annotated[str, typer.Option(help="Branch of the repository; made where it lacks")]
Tag = Annotated[str | None, typer.Option(help="Name for the commit")]
CommitMessage = Annotated[str | None, typer.Option(help="Message of the commit")]
