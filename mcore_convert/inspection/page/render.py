"""Rendering of the templates, and writing of the page."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_convert.errors import UnwritableTarget
from mcore_convert.storage.disk import write_whole
from mcore_convert.version import VERSION

if TYPE_CHECKING:
    from markupsafe import Markup

HERE = Path(__file__).parent


def render(template: str, scripts: Sequence[str], **values: Any) -> str:
    """Return a page as text: a template with the style, and the scripts that it needs, inlined.

    Values from a checkpoint are escaped everywhere.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    def static(names: Iterable[str]) -> Markup:
        return Markup("\n").join(Markup((HERE / "static" / name).read_text(encoding="utf-8")) for name in names)

    environment = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["breakable"] = breakable
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False, "allow_nan": False, "separators": (",", ":")}
    return environment.get_template(template).render(
        css=static(["page.css"]).replace("/* dark.css */", static(["dark.css"])),
        theme=static(["theme.js"]),
        scripts=static(["common.js", *scripts]),
        version=VERSION,
        **values,
    )


def breakable(name: str) -> Markup:
    """Return a long name that may break after a dot, an underscore or a slash."""
    from markupsafe import Markup

    return Markup("<wbr>").join(re.split(r"(?<=[._/])", name))


def check_place(path: Path) -> None:
    """Prove that a page can be written to this path, before anything is read for it.

    Raises:
        UnwritableTarget: it cannot.
    """
    if path.is_dir():
        raise UnwritableTarget(f"`{path}` is a directory", hint="name the file to write")
    if not path.parent.is_dir():
        raise UnwritableTarget(f"`{path.parent}` is not a directory", hint="make it, or name another file")
    if not os.access(path.parent, os.W_OK):
        raise UnwritableTarget(f"`{path.parent}` cannot be written to")


def write_page(path: Path, text: str) -> None:
    """Write a page completely, or not at all.

    Raises:
        UnwritableTarget: it cannot be written.
    """
    check_place(path)
    try:
        write_whole(path, text.encode(errors="backslashreplace"))
    except OSError as error:
        raise UnwritableTarget(f"cannot write `{path}`: {error.strerror}") from error
