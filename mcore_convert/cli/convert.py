"""`mcore-convert convert`."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mcore_convert.cli import options
from mcore_convert.cli.text import in_bytes, in_parameters, progress, say, show, table

if TYPE_CHECKING:
    from mcore_convert.api import Conversion


def command(
    source: Annotated[
        str, typer.Argument(help="Hugging Face or Megatron directory or file, a training run, or a Hub id")
    ],
    destination: Annotated[Path, typer.Argument(help="Directory to make; it appears when it is complete")],
    to: options.To = None,
    tp: options.Tp = 1,
    pp: options.Pp = 1,
    vpp: options.Vpp = None,
    ep: options.Ep = 1,
    etp: options.Etp = None,
    first_stage_layers: options.FirstStage = None,
    last_stage_layers: options.LastStage = None,
    pipeline_layout: options.PipelineLayout = None,
    no_optimizer: options.NoOptimizer = False,
    allow_drift: options.AllowDrift = False,
    implementation: options.Names = None,
    for_megatron: options.ForMegatron = None,
    iteration: options.Iteration = None,
    family: options.Family = None,
    hf_config: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            rich_help_panel=options.SOURCE,
            help="Original config.json to keep, but for what the checkpoint proves different",
        ),
    ] = None,
    ignore_key: options.IgnoreKey = None,
    vocab_size: options.VocabSize = None,
    arg: options.Given = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            rich_help_panel=options.TARGET,
            help="What --tokenizer-model shall name in the stored arguments",
        ),
    ] = None,
    max_shard_size: options.MaxShardSize = None,
    revision: options.Revision = None,
    strict: options.Strict = False,
    no_checksums: options.NoChecksums = False,
    overwrite: options.Overwrite = False,
    dry_run: options.DryRun = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = 0,
    log_level: options.LogLevel = None,
) -> None:
    """Convert a checkpoint into another format.

    Example: mcore-convert convert ./Llama-3.2-1B ./out --tp 2
    """
    from mcore_convert.api import convert

    with progress(quiet=quiet) as update:
        done = convert(
            source,
            destination,
            to=to,
            tp=tp,
            pp=pp,
            vpp=vpp,
            ep=ep,
            etp=etp,
            first_stage_layers=first_stage_layers,
            last_stage_layers=last_stage_layers,
            pipeline_layout=pipeline_layout,
            optimizer=not no_optimizer,
            allow_drift=allow_drift,
            implementation=implementation.value if implementation else None,
            for_megatron=for_megatron,
            iteration=iteration,
            family=family,
            hf_config=hf_config,
            ignore_keys=ignore_key or (),
            vocab_size=vocab_size,
            given=options.arguments(arg),
            tokenizer=tokenizer,
            max_shard_size=max_shard_size,
            revision=revision,
            strict=strict,
            checksums=not no_checksums,
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
