"""Docstrings of the library's modules: noun phrases for what a file owns."""

from __future__ import annotations

import ast

from tests.kinds import ROOT

QUESTIONS = {"What", "How", "Whether", "Where", "Which"}


def test_no_module_opens_with_a_question() -> None:
    first = {
        str(path.relative_to(ROOT)): (ast.get_docstring(ast.parse(path.read_text())) or "").partition(" ")[0]
        for path in (ROOT / "mcore_convert").rglob("*.py")
    }
    assert [path for path, word in first.items() if word in QUESTIONS] == []
