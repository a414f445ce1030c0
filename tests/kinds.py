"""The kinds of tests, each a folder and a marker.

| kind | its tests |
| --- | --- |
| unit | run in this process, in seconds, with no model and no network: what `make check` runs |
| oracle | compare with Megatron Core, transformers, the Hub's client, or checkpoints that Megatron-LM wrote |
| train | run the training entry, or the demo and the documentation, which train too |
| browser | open pages in Chromium |

A test is of the kind of its folder. A marker of a kind on a test comes before that: a few tests in files of units run a
model. A unit test that starts a process or takes seconds is marked `slow` and left out of `make check`; one that starts
a process and is not marked fails (see `conftest.py`).
"""

from __future__ import annotations

from pathlib import Path

KINDS = ("unit", "oracle", "train", "browser")
TESTS = Path(__file__).parent
ROOT = TESTS.parent


class UnknownKind(Exception):
    """A test file is in no folder of a kind."""


def kind_of(path: Path) -> str:
    """Return the kind of a test file, by its folder."""
    folder = path.relative_to(TESTS).parts[0]
    if folder not in KINDS:
        raise UnknownKind(f"{path} is in no folder of tests/{{{','.join(KINDS)}}}: move it to that of its kind")
    return folder
