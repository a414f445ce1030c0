"""Options that several commands share, each defined once, and the parsing of their values."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mcore_convert.cli import completion, logs
from mcore_convert.cli.choices import Dtype, Implementation, Quantisation, page_name, size

# Panels of `--help`, in this order; options without a panel come first.
SOURCE, LAYOUT, TARGET, RUN, HUB, OUTPUT = PANELS = (
    "Source options",
    "Layout options",
    "Target options",
    "Options for a whole run",
    "Hub options",
    "Output options",
)

Family = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        autocompletion=completion.families,
        rich_help_panel=SOURCE,
        help="Model family, if it cannot be detected",
    ),
]
HfConfig = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH", rich_help_panel=SOURCE, help="Configuration of a Megatron checkpoint that stores no arguments"
    ),
]
ConfigToKeep = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        rich_help_panel=SOURCE,
        help="Original config.json to keep, except where the checkpoint differs",
    ),
]
ModelFolder = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        rich_help_panel=SOURCE,
        help="Original model's config.json or directory, with its tokenizer and licence",
    ),
]
VocabSize = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        rich_help_panel=SOURCE,
        help="True vocabulary of a Megatron checkpoint that does not store it",
    ),
]
Given = Annotated[
    list[str] | None,
    typer.Option(
        "--arg",
        metavar="NAME=VALUE",
        rich_help_panel=SOURCE,
        help="Megatron argument that an old checkpoint does not store",
    ),
]
IgnoreKey = Annotated[
    list[str] | None,
    typer.Option(
        "--ignore-key",
        metavar="NAME",
        rich_help_panel=SOURCE,
        help="Unknown key of config.json to treat as having no effect; repeatable",
    ),
]
AllowDrift = Annotated[
    bool,
    typer.Option(
        "--allow-drift",
        rich_help_panel=SOURCE,
        help="Take the first rank's copy where ranks hold slightly different ones",
    ),
]
Revision = Annotated[
    str | None, typer.Option(metavar="NAME", rich_help_panel=SOURCE, help="Branch, tag or commit of a Hub id")
]
Stream = Annotated[
    bool,
    typer.Option(
        "--stream", rich_help_panel=SOURCE, help="Convert a Hub id while it comes, and keep no download of it"
    ),
]

Tp = Annotated[int, typer.Option(min=1, metavar="N", rich_help_panel=LAYOUT, help="Tensor-parallel size")]
Pp = Annotated[int, typer.Option(min=1, metavar="N", rich_help_panel=LAYOUT, help="Pipeline-parallel size")]
Vpp = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", rich_help_panel=LAYOUT, help="Virtual pipeline stages on each pipeline rank"),
]
Ep = Annotated[int, typer.Option(min=1, metavar="N", rich_help_panel=LAYOUT, help="Expert-parallel size")]
Etp = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        rich_help_panel=LAYOUT,
        help="Tensor-parallel size of experts; as --tp unless given, or 1 where experts have biases",
    ),
]
FirstStage = Annotated[
    int | None, typer.Option(min=0, metavar="N", rich_help_panel=LAYOUT, help="Layers on the first pipeline stage")
]
LastStage = Annotated[
    int | None, typer.Option(min=0, metavar="N", rich_help_panel=LAYOUT, help="Layers on the last pipeline stage")
]
PipelineLayout = Annotated[
    str | None,
    typer.Option(
        metavar="STAGES", rich_help_panel=LAYOUT, help="Stages spelled out, as --pipeline-model-parallel-layout"
    ),
]
Planned = Annotated[
    int | None,
    typer.Option(
        min=1, metavar="N", rich_help_panel=LAYOUT, help="Size of a planned layout to show beside the checkpoint's own"
    ),
]

To = Annotated[
    str | None,
    typer.Option(
        metavar="FORMAT",
        autocompletion=completion.formats,
        rich_help_panel=TARGET,
        help="Format to write, as hf, torch_dist or torch; the other one of hf and torch_dist unless given",
    ),
]
ToMegatron = Annotated[
    str | None,
    typer.Option(
        metavar="FORMAT",
        autocompletion=completion.megatron_formats,
        rich_help_panel=TARGET,
        help="Format to write, torch_dist or torch; that of the source unless given",
    ),
]
NoOptimizer = Annotated[
    bool, typer.Option("--no-optimizer", rich_help_panel=TARGET, help="Leave optimizer state behind")
]
Names = Annotated[
    Implementation | None,
    typer.Option(rich_help_panel=TARGET, help="Layer spec whose parameter names are written"),
]
ForMegatron = Annotated[
    str | None,
    typer.Option(
        metavar="VERSION",
        rich_help_panel=TARGET,
        help="Megatron-LM release that will load it; the one that wrote the source unless given",
    ),
]
Iteration = Annotated[
    int | None,
    typer.Option(min=0, metavar="N", rich_help_panel=TARGET, help="Number of the iter_* directory to write"),
]
TokenizerName = Annotated[
    str | None,
    typer.Option(metavar="PATH", rich_help_panel=TARGET, help="Value of --tokenizer-model in the stored arguments"),
]
Tokenizer = Annotated[
    str | None,
    typer.Option(metavar="PATH", rich_help_panel=TARGET, help="Directory or Hub id of the tokenizer to add"),
]
NoTokenizer = Annotated[
    bool, typer.Option("--no-tokenizer", rich_help_panel=TARGET, help="Export the model without a tokenizer")
]
FromMaster = Annotated[
    bool,
    typer.Option(
        "--from-master",
        rich_help_panel=TARGET,
        help="Take the optimizer's fp32 master copies in place of the weights",
    ),
]
ToDtype = Annotated[
    Dtype | None, typer.Option(rich_help_panel=TARGET, help="Round weights to it; as stored unless given")
]
Quantize = Annotated[
    Quantisation | None,
    typer.Option(rich_help_panel=TARGET, help="Quantise the weights of linear layers; the loss is reported"),
]
Metadata = Annotated[
    list[str] | None,
    typer.Option(
        "--metadata",
        metavar="NAME=VALUE",
        rich_help_panel=TARGET,
        help="Field of the model card, as license or datasets",
    ),
]
MaxShardSize = Annotated[
    int | None,
    typer.Option(
        parser=size,
        metavar="SIZE",
        rich_help_panel=TARGET,
        help="Largest safetensors or .distcp file; 5GB and 2GiB unless given",
    ),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", rich_help_panel=TARGET, help="Replace a destination that exists")
]

Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        rich_help_panel=RUN,
        help="Continue a run that was killed or ran out of space; keep complete files if this one is, too",
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", rich_help_panel=RUN, help="Threads that copy; as many as processors unless given"),
]

PushToHub = Annotated[
    str | None, typer.Option(metavar="REPO", rich_help_panel=HUB, help="Repository on the Hub to send it to")
]
Strict = Annotated[
    bool, typer.Option("--strict", rich_help_panel=TARGET, help="Refuse NaN and infinities, which are a note otherwise")
]
NoChecksums = Annotated[
    bool,
    typer.Option("--no-checksums", rich_help_panel=TARGET, help="Leave checksums out of the manifest"),
]

Private = Annotated[bool, typer.Option("--private", rich_help_panel=HUB, help="Make a new repository private")]
Branch = Annotated[
    str, typer.Option(metavar="NAME", rich_help_panel=HUB, help="Branch of the repository; created if missing")
]
Tag = Annotated[str | None, typer.Option(metavar="NAME", rich_help_panel=HUB, help="Name for the commit")]
CommitMessage = Annotated[str | None, typer.Option(metavar="TEXT", rich_help_panel=HUB, help="Message of the commit")]

DryRun = Annotated[bool, typer.Option("--dry-run", rich_help_panel=OUTPUT, help="Plan and check; write nothing")]
Html = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.html", callback=page_name, rich_help_panel=OUTPUT, help="Also write one self-contained page"
    ),
]
Json = Annotated[bool, typer.Option("--json", rich_help_panel=OUTPUT, help="Print the result, or the error, as JSON")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", rich_help_panel=OUTPUT, help="Print errors only")]
Verbose = Annotated[
    int,
    typer.Option(
        "--verbose",
        "-v",
        count=True,
        callback=logs.verbose,
        show_default=False,
        rich_help_panel=OUTPUT,
        help="Log phases with their times to stderr; -vv each file, too",
    ),
]
LogLevel = Annotated[
    logs.Level | None,
    typer.Option(
        callback=logs.at_level, case_sensitive=False, rich_help_panel=OUTPUT, help="Log to stderr from this level on"
    ),
]
