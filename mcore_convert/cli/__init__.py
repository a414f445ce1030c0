"""The command `mcore-convert`: one file per subcommand. Data goes to stdout, messages and progress to stderr."""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import NoReturn

import typer

from mcore_convert.cli import convert, families, inspect, verify
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
app.command("verify")(verify.command)
app.command("inspect")(inspect.command)
app.command("families")(families.command)


def main() -> NoReturn:
    """Run the command line. Exit code 0: done; 1: refused, or different; 2: wrong usage."""
    signal.signal(signal.SIGTERM, _terminate)
    try:
        app()
    except ConvertError as error:
        say(f"error: {error.message}")
        for line in str(error).splitlines()[len(error.message.splitlines()) :]:
            say(line if line.startswith("hint:") else f"       {line}")
        sys.exit(1)
    except KeyboardInterrupt:
        say("interrupted; nothing was left behind")
        sys.exit(130)
    sys.exit(0)


def _terminate(number: int, frame: FrameType | None) -> None:
    """A polite kill cleans up as Ctrl-C does."""
    raise KeyboardInterrupt
