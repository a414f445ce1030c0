"""Additions of the documentation site to docs/: the pages of the repository outside of it, and links that work there.

A hook of mkdocs. On the site README.md is the first page, and a file that a page links to, such as a source file, is a
page that shows it, so that no link leaves the site for a repository that may be elsewhere.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = {  # pages outside of docs/, and where they are on the site
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
}
LINK = re.compile(r"(?<=\]\()(?P<target>[^)#\s:]+)(?P<anchor>#[^)\s]*)?(?=\))")


def site_path(path: str) -> str:
    """Return where a file of the repository is on the site."""
    if path in PAGES:
        return PAGES[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else f"source/{path}.md"


def repository_path(uri: str) -> str:
    """Return the file of the repository that a page of the site shows."""
    return next((path for path, page in PAGES.items() if page == uri), f"docs/{uri}")


def linked(markdown: str, path: str) -> list[str]:
    """Return the files of the repository that the page at `path` links to."""
    targets = (resolved(match["target"], path) for match in LINK.finditer(markdown))
    return [target for target in targets if (ROOT / target).is_file()]


def resolved(target: str, path: str) -> str:
    """Return the path in the repository of a link on the page at `path`."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), target))


def with_links_of_the_site(markdown: str, path: str) -> str:
    """Return a page of the repository with links that lead to the same files on the site.

    A link that leads to no file is left as it is: mkdocs reports it.
    """
    here = posixpath.dirname(site_path(path))

    def spelled(match: re.Match[str]) -> str:
        target = resolved(match["target"], path)
        if not (ROOT / target).is_file():
            return match[0]
        return posixpath.relpath(site_path(target), here or ".") + (match["anchor"] or "")

    return LINK.sub(spelled, markdown)


def source_page(path: str) -> str:
    """Return a page that shows a file that is not Markdown."""
    kind = "python" if path.endswith(".py") else "text"
    return f"# {path}\n\n````{kind}\n{(ROOT / path).read_text()}````\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages outside of docs/, and a page for each other file that a page links to."""
    from mkdocs.structure.files import File, InclusionLevel

    def add(uri: str, content: str, **options: InclusionLevel) -> None:
        if files.get_file_from_path(uri) is None:
            files.append(File.generated(config, uri, content=content, **options))

    for path, uri in PAGES.items():
        add(uri, (ROOT / path).read_text())
    for page in files.documentation_pages():
        path = repository_path(page.src_uri)
        for target in linked(page.content_string, path):
            if site_path(target).startswith("source/"):
                add(site_path(target), source_page(target), inclusion=InclusionLevel.NOT_IN_NAV)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links of a page that shows a file of the repository."""
    path = repository_path(page.file.src_uri)
    return with_links_of_the_site(markdown, path) if (ROOT / path).is_file() else markdown
