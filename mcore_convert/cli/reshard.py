"""`mcore-convert reshard`."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import Annotated

import typer

from mcore_convert.cli import options
from mcore_convert.cli.convert import report
from mcore_convert.cli.text import progress, show


def command(
    source: Annotated[Path, typer.Argument(help="Megatron directory, or a training run")],
    destination: Annotated[Path, typer.Argument(help="Directory to make; it appears when it is complete")],
    tp: options.Tp = 1,
    pp: options.Pp = 1,
    vpp: options.Vpp = None,
    ep: options.Ep = 1,
    etp: options.Etp = None,
    first_stage_layers: options.FirstStage = None,
    last_stage_layers: options.LastStage = None,
    pipeline_layout: options.PipelineLayout = None,
    to: options.ToMegatron = None,
    no_optimizer: options.NoOptimizer = False,
    allow_drift: options.AllowDrift = False,
    implementation: options.Names = None,
    for_megatron: options.ForMegatron = None,
    iteration: options.Iteration = None,
    ignore_key: options.IgnoreKey = None,
    vocab_size: options.VocabSize = None,
    arg: options.Given = None,
    strict: options.Strict = False,
    no_checksums: options.NoChecksums = False,
    overwrite: options.Overwrite = False,
    dry_run: options.DryRun = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = 0,
    log_level: options.LogLevel = None,
) -> None:
    """Bring a Megatron checkpoint to another layout, its optimizer state with it.

    Example: mcore-convert reshard ./tp2pp2 ./tp1 --tp 1 --pp 1
    """
    from mcore_convert.api import reshard

    with progress(quiet=quiet) as update:
        done = reshard(
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
            ignore_keys=ignore_key or (),
            vocab_size=vocab_size,
            given=options.arguments(arg),
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
