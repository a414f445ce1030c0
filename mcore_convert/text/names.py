"""The end of a message about a name that does not exist."""

from __future__ import annotations


def meant(near: object) -> str:
    """Suggest a near name: `; did you mean ...?`; empty if there is none."""
    return f"; did you mean `{near}`?" if near else ""
