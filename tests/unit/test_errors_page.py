"""docs/errors.md: the page is the generated one, every golden refusal is on it, and every kind has an example."""

from __future__ import annotations

import pytest

from tests import errors_page
from tests.errors_page import FILES, KINDS, PAGE, UnknownRefusal, kind_of, page
from tests.refusals import golden_texts


def test_the_page_is_the_generated_one() -> None:
    assert PAGE.read_text() == page(), "run python -m tests.errors_page"


def test_every_refusal_is_on_the_page() -> None:
    """Of every golden file: the message stands there in full, below its title."""
    assert "refusals.txt" in FILES
    text = PAGE.read_text().lower().replace("\n", " ")
    for name in FILES:
        for title, message in golden_texts(name).items():
            assert message in PAGE.read_text()
            assert title.lower() in text


def test_every_kind_has_an_example() -> None:
    """A pattern that matches nothing is out of date."""
    kinds = [kind_of(text) for name in FILES for text in golden_texts(name).values()]
    assert [kind.title for kind in KINDS if kind not in kinds] == []


def test_a_refusal_of_no_kind_is_reported_with_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {"a new one": "error: the moon is full\n", "another": "error: no moon\nhint: wait\n"}
    monkeypatch.setattr(errors_page, "golden_texts", lambda name: texts)
    with pytest.raises(UnknownRefusal, match="a new one: error: the moon is full\nanother: error: no moon"):
        page()
