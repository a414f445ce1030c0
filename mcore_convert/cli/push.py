"""`mcore-convert push`."""

from __future__ import annotations

import json as jsonlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Unpack

import typer

from mcore_convert.cli import options
from mcore_convert.cli.interruption import Interrupted, keyboard_interrupts
from mcore_convert.cli.parameters import taking
from mcore_convert.cli.terminal import in_bytes, progress, show, table
from mcore_convert.options import HubOptions

if TYPE_CHECKING:
    from mcore_convert.publishing.upload import Upload


@taking(HubOptions)
def command(
    source: Annotated[Path, typer.Argument(help="Hugging Face directory; any other checkpoint is exported first")],
    repo: Annotated[str, typer.Argument(help="OWNER/NAME on the Hub, or NAME for yourself; created if missing")],
    *,
    ignore_key: options.IgnoreKey = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", rich_help_panel=options.OUTPUT, help="Show what would be uploaded; upload nothing"),
    ] = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
    **given: Unpack[HubOptions],
) -> None:
    """Upload a model to the Hub. Files that are already there are not sent again: repeat an interrupted push.

    Example: mcore-convert push ./exported you/your-model --private
    """
    from mcore_convert.publishing.publish import push

    try:
        with keyboard_interrupts(), progress(quiet=quiet) as update:
            done = push(
                source,
                repo,
                ignore_keys=ignore_key or (),
                dry_run=dry_run,
                progress=update,
                bars=not quiet and sys.stderr.isatty(),
                **given,
            )
    except Interrupted as stop:
        stop.remains = "run it again: what has arrived is not sent twice"
        raise
    if json:
        show(jsonlib.dumps(done.as_dict(), indent=2))
    elif not quiet:
        for line in as_lines(done):
            show(line)


def as_lines(done: Upload) -> Iterator[str]:
    """Yield the files that were sent, or would be, in a few lines."""
    made = "a new repository" if done.created else f"branch {done.branch}"
    yield f"to  {done.url}  {made}"
    rows = [("send" if done.dry_run else "sent", name, in_bytes(size)) for name, size in done.sent.items()]
    rows += [("there", name, in_bytes(size)) for name, size in done.kept.items()]
    rows += [("remove" if done.dry_run else "removed", name, "") for name in done.removed]
    for line in table(rows, right=(2,)):
        yield f"  {line}"
    total = in_bytes(sum(done.sent.values()))
    if done.dry_run:
        yield f"{total} in {len(done.sent)} files to send, nothing sent (--dry-run)"
    elif done.commit is None:
        yield "everything is there already"
    else:
        yield f"{total} in {len(done.sent)} files sent, commit {done.commit[:8]}"
    if done.tag is not None:
        yield f"tag {done.tag}"
