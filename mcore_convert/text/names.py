"""The end of a message about a name that does not exist."""

from __future__ import annotations


def meant(near: object) -> str:
    """Name the one that is near: `; did you mean ...?`; empty where none is."""
    return f"; did you mean `{near}`?" if near else ""
