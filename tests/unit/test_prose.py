"""Plain technical English, as far as a program can tell: docstrings, and the names of values."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest

from tests.kinds import ROOT

ROOMS = ("mcore_convert", "converters", "train_entry", "fixtures", "examples", "benchmarks", "docs", "tests")
QUESTIONS = {"What", "How", "Whether", "Where", "Which"}
# Words that begin a noun phrase or a question, where the docstring of a function begins with a verb.
NO_VERBS = QUESTIONS | {"A", "An", "The", "This", "That", "These", "Those", "Each", "Every", "All", "One", "No", "Why"}
THINGS = ("property", "fixture", "contextmanager", "setter")  # a function that stands for a thing is called what it is
NO_NOUNS = re.compile(r"(^|_)(look(s|ed|ing)?|found|said|told|tell|helpers?|utils?|manager|stuff)(_|$)")
FROM_ELSEWHERE = {"tell"}  # a method of Python's files


@cache
def findings() -> dict[str, list[str]]:
    """Return what is wrong in the modules of the project, by kind. Each is parsed once, and no tree is kept."""
    files = [file for room in ROOMS for file in sorted((ROOT / room).rglob("*.py"))]
    wrong: dict[str, list[str]] = {"modules": [], "functions": [], "things": [], "names": []}
    for file in files:
        tree, path = ast.parse(file.read_text()), str(file.relative_to(ROOT))
        for kind, lines in wrong_in(tree).items():
            if kind != "things" or not path.startswith("tests/"):  # a test may say what it is about
                wrong[kind] += [f"{path}:{line}" for line in lines]
    assert len(files) > 500
    return wrong


def wrong_in(tree: ast.Module) -> dict[str, list[str]]:
    """Return what is wrong in a module, by kind, each with its line."""
    return {
        "modules": ["1"] if first_word(tree) in QUESTIONS else [],
        "functions": [f"{node.lineno} {node.name}" for node in functions(tree) if first_word(node) in NO_VERBS],
        "things": [
            f"{node.lineno} {node.name}"
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and first_word(node) in QUESTIONS - {"Whether"}
        ],
        "names": [
            f"{line} {name}" for line, name in names_of(tree) if NO_NOUNS.search(name) and name not in FROM_ELSEWHERE
        ],
    }


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    """Yield the functions whose docstring begins with a verb: neither tests nor what stands for a thing."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("test_"):
            decorators = " ".join(map(ast.unparse, node.decorator_list))
            if not any(thing in decorators for thing in THINGS):
                yield node


def names_of(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield each name that a module gives to something, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("test_"):
            yield node.lineno, node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg


def first_word(node: ast.Module | ast.ClassDef | ast.FunctionDef) -> str:
    """Return the first word of a docstring; nothing where there is none."""
    return (ast.get_docstring(node) or "").partition(" ")[0].strip(",.:;")


@pytest.mark.parametrize("kind", ["modules", "functions", "things", "names"])
def test_modules_are_in_plain_english(kind: str) -> None:
    """No docstring opens with a question, those of functions open with a verb, and values are called by nouns."""
    assert findings()[kind] == []


def test_files_are_named_after_what_they_hold() -> None:
    files = [file for room in ROOMS for suffix in ("*.py", "*.md") for file in (ROOT / room).rglob(suffix)]
    names = {str(file.relative_to(ROOT)): re.sub(r"\W", "_", file.stem).removeprefix("test_") for file in files}
    assert [path for path, name in names.items() if NO_NOUNS.search(name)] == []


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ("def f(found):\n    said = 1\n", {"names": ["1 found", "2 said"]}),
        ("class Teller:\n    x: int\n", {}),
        ('"""What it is."""\ndef f():\n    """The thing."""\n', {"modules": ["1"], "functions": ["2 f"]}),
        ('"""A thing."""\n@property\ndef f():\n    """Whether it is."""\n', {}),
        ('class A:\n    """What it is."""\n', {"things": ["1 A"]}),
    ],
)
def test_the_check_sees_what_is_wrong(source: str, wrong: dict[str, list[str]]) -> None:
    assert {kind: lines for kind, lines in wrong_in(ast.parse(source)).items() if lines} == wrong
