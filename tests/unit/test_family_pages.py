"""The pages of docs/families say what the tables of the families say today."""

from __future__ import annotations

from docs.generate import FOLDER, pages


def test_the_pages_are_those_that_the_tables_make() -> None:
    made = pages()
    assert sorted(path.name for path in FOLDER.iterdir()) == sorted(made), "run `python -m docs.generate`"
    for name, text in made.items():
        assert (FOLDER / name).read_text() == text, f"{name}: run `python -m docs.generate`"
