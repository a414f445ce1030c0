"""`mcore-convert export`."""

from __future__ import annotations

import json as jsonlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Unpack

import typer

from mcore_convert.cli import options
from mcore_convert.cli.interruption import Interrupted, keyboard_interrupts
from mcore_convert.cli.parameters import Parameter, taking
from mcore_convert.cli.push import as_lines
from mcore_convert.cli.terminal import in_bytes, in_parameters, progress, say, show, table
from mcore_convert.options import ExportOptions, ModelFolderOptions, part_of

if TYPE_CHECKING:
    from mcore_convert.publishing.publish import Export
    from mcore_convert.publishing.sweep import Swept


@taking(ExportOptions, hf_config=Parameter("hf_config", options.ModelFolder))
def command(
    source: Annotated[Path, typer.Argument(help="Checkpoint in any format, or the directory of a training run")],
    destination: Annotated[
        Path | None, typer.Argument(help="Directory to make; RUN/hf/iter_* or SOURCE-hf unless given")
    ] = None,
    *,
    every: Annotated[
        bool,
        typer.Option(
            "--all", rich_help_panel=options.RUN, help="Export every iteration of a run that is not exported yet"
        ),
    ] = False,
    watch: Annotated[
        bool,
        typer.Option(
            "--watch", rich_help_panel=options.RUN, help="With --all: wait for further iterations, until the run's last"
        ),
    ] = False,
    interval: Annotated[
        float,
        typer.Option(
            min=0, metavar="SECONDS", rich_help_panel=options.RUN, help="Time between two checks for new iterations"
        ),
    ] = 30.0,
    until: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", rich_help_panel=options.RUN, help="With --all: end after this iteration"),
    ] = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
    **given: Unpack[ExportOptions],
) -> None:
    """Make a complete Hugging Face directory: weights, configuration, tokenizer, model card.

    Example: mcore-convert export ./run --dtype bfloat16
    """
    bars = not quiet and sys.stderr.isatty()
    if given["tokenizer"] is not None and not given["with_tokenizer"]:
        raise typer.BadParameter("there is one or there is none", param_hint="--tokenizer and --no-tokenizer")
    if every:
        names = ("branch", "tag", "commit_message", "overwrite", "resume", "workers", "dry_run")
        if [given.get(name) for name in names] != ["main", None, None, False, False, None, False]:
            idle = "--branch, --tag, --commit-message, --overwrite, --resume, --workers and --dry-run"
            raise typer.BadParameter(f"an iteration has its own branch, and is never replaced: leave out {idle}")
        _sweep(
            source,
            destination,
            json=json,
            quiet=quiet,
            push_to_hub=given["push_to_hub"],
            private=given["private"],
            watch=watch,
            interval=interval,
            until=until,
            bars=bars,
            **part_of(ModelFolderOptions, given),
        )
        return
    if watch or until is not None:
        raise typer.BadParameter("they are for --all", param_hint="--watch and --until")
    from mcore_convert.publishing.publish import export

    with keyboard_interrupts(), progress(quiet=quiet) as update:
        given["progress"], given["bars"] = update, bars
        done = export(source, destination, **given)
    if json:
        show(jsonlib.dumps(done.as_dict(), indent=2))
    elif not quiet:
        report(done)


def report(done: Export) -> None:
    """Show the result or the plan of an export in a few lines."""
    facts, dims = done.as_dict(), done.plan.dims
    tied = "tied" if dims.tied else "untied"
    show(f"{facts['family']}  {dims.num_layers} layers  {in_parameters(facts['num_parameters'])} parameters  {tied}")
    size = f"{in_bytes(sum(done.files.values()))} in {len(done.files)} files"
    where = str(done.path or "a temporary directory")
    rows = [
        ("from", facts["source"]["format"], facts["source"]["path"], ""),
        ("to", "hf", where, f"{facts['num_tensors']} tensors in {' and '.join(facts['dtypes'])}, {size}"),
    ]
    for line in table(rows):
        show(line)
    if done.tokenizer is not None:
        template = ", with a chat template" if done.tokenizer.has_chat_template else ""
        show(f"tokenizer  {done.tokenizer.size} tokens{template}, of {done.tokenizer.place}")
    if done.checksum is not None:
        proof = "equal" if done.plan.target.quantised is None else "equal, or within what quantisation loses"
        show(f"checksum   {done.checksum}  every tensor read again and {proof}")
    if done.dry_run:
        for name, nbytes in done.files.items():
            show(f"      {name}  {in_bytes(nbytes)}")
        show("nothing written (--dry-run)")
    for note in done.notes:
        say(f"note: {note}")
    if done.upload is not None:
        for line in as_lines(done.upload):
            show(line)


def _sweep(source: Path, destination: Path | None, *, json: bool, quiet: bool, **wishes: Any) -> None:
    """Export all iterations, and report each when it is done. Exit code 1 if one was refused."""
    from mcore_convert.publishing.sweep import export_all

    counts = dict.fromkeys(("exported", "there", "refused"), 0)
    try:
        with keyboard_interrupts(), progress(quiet=quiet) as update:
            for swept in export_all(source, destination, progress=update, **wishes):
                counts[swept.state] += 1
                if json:
                    show(jsonlib.dumps(swept.as_dict()))
                elif not quiet:
                    show(line_of(swept))
                if swept.error is not None:
                    say(f"error: iteration {swept.iteration}: {swept.error}")
                sys.stdout.flush()
    except Interrupted as stop:
        stop.remains = f"{counts['exported']} exported; the same command goes on with the others"
        raise
    if not json and not quiet:
        total = sum(counts.values())
        words = [f"{count} {word}" for word, count in counts.items() if count or word == "exported"]
        show(f"{total} iteration{'s' * (total != 1)}: {', '.join(words)}")
    if counts["refused"]:
        raise typer.Exit(1)


def line_of(swept: Swept) -> str:
    """Return the line for one iteration: `iter_0000100 exported run/hf/iter_0000100 911 kB`."""
    words = [f"iter_{swept.iteration:07d}", swept.state.ljust(len("exported"))]
    if swept.path is not None:
        words.append(str(swept.path))
        if swept.export is not None:
            words.append(in_bytes(sum(swept.export.files.values())))
    if swept.upload is not None:
        words += [swept.upload.url, f"{in_bytes(sum(swept.upload.sent.values()))} sent"]
    return "  ".join(words).rstrip()
