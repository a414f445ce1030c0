"""The command `mcore-convert`: one file per subcommand. Data goes to stdout, messages and progress to stderr."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import typer

from mcore_convert.cli import convert, data, diff, export, families, inspect, push, reshard, train, verify
from mcore_convert.cli.interruption import Interrupted, interruptible
from mcore_convert.cli.text import say
from mcore_convert.errors import ConvertError

app = typer.Typer(
    name="mcore-convert",
    help="Convert checkpoints between Hugging Face and Megatron Core, bit for bit, without a GPU.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("convert")(convert.command)
app.command("reshard")(reshard.command)
app.command("export")(export.command)
app.command("push")(push.command)
app.command("verify")(verify.command)
app.command("diff")(diff.command)
app.command("inspect")(inspect.command)
app.command("families")(families.command)
app.command("train")(train.command)
app.add_typer(data.app, name="data")


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line. Exit code 0: done; 1: refused, or different; 2: wrong usage; 128 + n: stopped by signal n.

    Args:
        argv: the words after the command's name; those of this process unless given.
    """
    try:
        try:
            with interruptible():
                app(argv)
        finally:
            sys.stdout.flush()  # here, and not when Python ends, where a failure could not be told
    except ConvertError as error:
        say(f"error: {error.message}")
        for line in str(error).splitlines()[len(error.message.splitlines()) :]:
            say(line if line.startswith("hint:") else f"       {line}")
        sys.exit(1)
    except Interrupted as stop:
        say(f"interrupted; {stop.remains}")
        sys.exit(128 + stop.number)
    except OSError as error:  # those of checkpoints are ConvertErrors: this is our own output
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno != errno.EPIPE:  # a reader that has gone (`| head`) needs no message
            say(f"error: cannot write the output: {error.strerror}")
        sys.exit(1)
    sys.exit(0)
