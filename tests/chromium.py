"""A real headless Chromium, and pages opened in it: what a page complains of or asks the network for is an error."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--no-sandbox",  # tests may run as root
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
WIDE, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """The browser of this machine; the test is skipped where there is none."""
    result = next(filter(None, map(shutil.which, NAMES)), None)
    if result is None:
        pytest.skip(f"no Chromium is installed: none of {', '.join(NAMES)} is found")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=result, args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


@contextlib.contextmanager
def opened(browser: Browser, file: Path, **options: Any) -> Iterator[Page]:
    """A file in a fresh context, with no storage and no cache. It must not complain, nor ask for anything else."""
    context = browser.new_context(**{"viewport": WIDE, **options})
    problems: list[str] = []
    try:
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("console", lambda message: problems.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: problems.append(f"error: {error}"))
        page.on("dialog", lambda dialog: problems.append(f"dialog: {dialog.message}"))
        page.on("request", lambda request: problems.append(f"request: {request.url}"))
        page.goto(file.as_uri())
        asked = [problem for problem in problems if problem != f"request: {file.as_uri()}"]
        assert not asked
        problems.clear()
        yield page
        assert not problems
    finally:
        context.close()
