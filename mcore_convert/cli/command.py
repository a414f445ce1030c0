"""Commands whose `--help` is in groups: options by topic, commands by purpose."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from typer.core import TyperCommand, TyperGroup

from mcore_convert.cli.options import OUTPUT, PANELS

WIDTH = 120  # of `--help`, if the terminal is wide enough
ENOUGH = 1000  # characters: more than any first sentence has, so that none is cut
SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": WIDTH}


class Command(TyperCommand):
    """Command whose options are shown panel by panel."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, then a section for each panel in the order of `PANELS`."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": [], **{name: [] for name in PANELS}}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is None:
                continue
            if param.param_type_name == "argument":
                sections["Arguments"].append(record)
            else:
                panel = OUTPUT if param.name == "help" else getattr(param, "rich_help_panel", None)
                sections[panel or "Options"].append(record)
        _write(formatter, sections.items())


class Group(TyperGroup):
    """Command with subcommands, shown group by group, each with its first sentence in full."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write a section for each group of commands in the order of their registration, then the options."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command is not None and not command.hidden:
                panel = getattr(command, "rich_help_panel", None)
                heading = panel if isinstance(panel, str) else "Commands"
                sections.setdefault(heading, []).append((name, command.get_short_help_str(ENOUGH)))
        records = (param.get_help_record(ctx) for param in self.get_params(ctx))
        _write(formatter, [*sections.items(), ("Options", [record for record in records if record is not None])])


def _write(formatter: Any, sections: Iterable[tuple[str, list[tuple[str, str]]]]) -> None:
    for heading, records in sections:
        if records:
            with formatter.section(heading):
                formatter.write_dl(records)
