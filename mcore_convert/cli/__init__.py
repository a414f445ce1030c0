"""The command `mcore-convert`: one file per subcommand. Data goes to stdout, messages and progress to stderr."""

from __future__ import annotations

import errno
import functools
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Annotated, Any, NoReturn

import typer

from mcore_convert.cli import convert, data, diff, export, families, inspect, logs, push, reshard, train, verify
from mcore_convert.cli.command import SETTINGS, Command, Group
from mcore_convert.cli.failures import DONE, Failures, UsageError
from mcore_convert.cli.interruption import Interrupted, interruptible
from mcore_convert.cli.sharing import sharing
from mcore_convert.cli.terminal import say, show
from mcore_convert.errors import ConvertError
from mcore_convert.storage.destination import counts, has_journal, left
from mcore_convert.version import VERSION

NAME = "mcore-convert"
MOVE, COMPARE, TRAIN = "Move checkpoints", "Compare and inspect", "Train"

app = typer.Typer(
    name=NAME,
    cls=Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings=SETTINGS,
)
app.command("convert", cls=Command, rich_help_panel=MOVE)(convert.command)
app.command("reshard", cls=Command, rich_help_panel=MOVE)(reshard.command)
app.command("export", cls=Command, rich_help_panel=MOVE)(export.command)
app.command("push", cls=Command, rich_help_panel=MOVE)(push.command)
app.command("verify", cls=Command, rich_help_panel=COMPARE)(verify.command)
app.command("diff", cls=Command, rich_help_panel=COMPARE)(diff.command)
app.command("inspect", cls=Command, rich_help_panel=COMPARE)(inspect.command)
app.command("families", cls=Command, rich_help_panel=COMPARE)(families.command)
app.command("train", cls=Command, rich_help_panel=TRAIN)(train.command)
app.add_typer(data.app, name="data", rich_help_panel=TRAIN)


def show_version(wanted: bool) -> None:
    """Print the version, and exit."""
    if wanted:
        show(f"{NAME} {VERSION}")
        raise typer.Exit


@app.callback()
def group(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Convert checkpoints between Hugging Face and Megatron Core, bit for bit, without a GPU."""


@functools.cache
def _commands() -> Any:
    """Return every command with its parameters, built once per process; typer would rebuild them per command line."""
    return typer.main.get_command(app)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and end with its exit code.

    0: done, or equal; 1: refused, or different; 2: wrong usage, or not comparable; 3: a bug; 128 + n: stopped by
    signal n. `docs/command-line.md` has the table.

    Args:
        argv: the arguments after the command's name; those of this process unless given.
    """
    words = [*(sys.argv[1:] if argv is None else argv)]
    failures = Failures(words)
    with sharing(words) as scope:
        _run(words, failures, scope)


def _run(words: Sequence[str], failures: Failures, scope: AbstractContextManager[object]) -> NoReturn:
    before = counts()[1]
    try:
        try:
            with interruptible(), scope:
                code = _commands()(words, prog_name=NAME, standalone_mode=False)
        finally:
            sys.stdout.flush()  # here, not when Python exits, where a failure could not be reported
    except SystemExit as end:
        sys.exit(failures.trouble if isinstance(end.__context__, OSError) else end.code)  # the output has no reader
    except ConvertError as error:
        code = failures.refused(error)
        for path in filter(has_journal, left(before)):
            say(f"note: what is complete stays in `{path}`: --resume goes on with it")
        sys.exit(code)
    except UsageError as error:
        sys.exit(failures.misused(error))
    except Interrupted as stop:
        traceback.clear_frames(stop.__traceback__)  # a signal may interrupt the exit of a scope, before its cleanup
        sys.exit(failures.interrupted(stop.number, stop.remains))
    except OSError as error:  # errors of checkpoints are ConvertErrors
        if error.filename is not None:
            sys.exit(failures.of_system(error))
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # no file name: the error is of our own output
        if error.errno != errno.EPIPE:  # a closed pipe (`| head`) needs no message
            say(f"error: cannot write the output: {error.strerror}")
        sys.exit(failures.trouble)
    except Exception as error:
        sys.exit(failures.unexpected(error))
    finally:
        logs.silence()
    sys.exit(code if isinstance(code, int) else DONE)
