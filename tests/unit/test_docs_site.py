"""The documentation site: its navigation, its links, and the public names in its reference. CI builds it strictly."""

from __future__ import annotations

import pkgutil
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

import mcore_convert
from docs import site_pages
from docs.site_pages import PAGES, linked, repository_path, site_path, source_page, with_links_of_the_site
from fixtures.megatron_flags import VERSIONS, rows
from mcore_convert import errors, spec
from mcore_convert.checkpoints.manifest import MANIFEST
from mcore_convert.cli import app
from tests.kinds import ROOT

DOCS = ROOT / "docs"
REFERENCE = DOCS / "reference"
# Files of Megatron-LM and Megatron Core that pages name, and groups of entry points, which are no modules.
MEGATRONS = {"distrib_optimizer.py", "moe/router.py", "preprocess_data.py", "pretrain_gpt.py", "schedules.py"}
MEGATRONS |= {"pretrain_mamba.py", "pretrain_hybrid.py"}
ENTRY_POINTS = {"mcore_convert.families"}
LIBRARY = ROOT / "mcore_convert"
WRITTEN = [ROOT / page for page in PAGES if page != "CHANGELOG.md"]
WRITTEN += [page for page in DOCS.rglob("*.md") if page.parent.name != "families" and page.name != "errors.md"]
OF_TOOLS = {
    *("--help", "--version", "--install-completion", "--show-completion"),
    *("--extra-index-url", "--editable"),  # pip
    *("--nnodes", "--nproc-per-node", "--rdzv-backend", "--rdzv-endpoint"),  # torchrun
    *(
        "--bundle",
        "--repo",
        "--check",
        "--ignore-missing",
        "--logdir",
        "--device",
    ),  # gh, sha256sum, tensorboard, transformers
}


def config() -> dict[str, Any]:
    """mkdocs.yml, but for its reading of the environment."""

    content: dict[str, Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text().replace(" !ENV ", " "))
    return content


def pages_of(nav: Any) -> list[str]:
    """Return the pages of a navigation, in order."""
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [page for part in parts for page in pages_of(part)]


def test_every_page_is_in_the_navigation() -> None:
    """Those of the families are listed by a page of their own."""
    assert config()["not_in_nav"].split() == ["/families/*.md"]
    pages = [path for path in DOCS.rglob("*.md") if path.parent != DOCS / "families" or path.name == "README.md"]
    named = [str(path.relative_to(DOCS)) for path in pages]
    assert sorted(pages_of(config()["nav"])) == sorted([*named, *PAGES.values()])


def test_files_of_the_configuration_exist() -> None:
    content = config()
    paths = [*content["hooks"], *content["watch"], *(f"docs/{path}" for path in content["extra_css"])]
    assert not [path for path in paths if not (ROOT / path).exists()]
    assert set(content["validation"].values()) == {"warn"}


@pytest.mark.parametrize(
    ("path", "markdown", "expected"),
    [
        ("README.md", "[a](docs/reshard.md#x)", "[a](reshard.md#x)"),
        ("README.md", "[![p](docs/page.png)](docs/inspect.md)", "[![p](page.png)](inspect.md)"),
        ("README.md", "[l](LICENSE) [c](CONTRIBUTING.md)", "[l](source/LICENSE.md) [c](contributing.md)"),
        ("docs/data.md", "[b](../mcore_convert/api.py)", "[b](source/mcore_convert/api.py.md)"),
        ("docs/inspect.md", "[b](../benchmarks/README.md)", "[b](benchmarks.md)"),
        ("docs/decisions/README.md", "[h](../how-it-works.md)", "[h](../how-it-works.md)"),
        ("docs/decisions/README.md", "[r](../../README.md)", "[r](../index.md)"),
        ("benchmarks/README.md", "[h](../docs/how-it-works.md)", "[h](how-it-works.md)"),
        (
            "README.md",
            "[w](https://example.org/a.md) [h](#here) f[0](x)",
            "[w](https://example.org/a.md) [h](#here) f[0](x)",
        ),
        ("README.md", "[gone](docs/gone.md)", "[gone](docs/gone.md)"),
    ],
)
def test_links_lead_to_the_same_file_on_the_site(path: str, markdown: str, expected: str) -> None:
    assert with_links_of_the_site(markdown, path) == expected


def test_places_are_there_and_back() -> None:
    for path in [*PAGES, *(f"docs/{page.relative_to(DOCS)}" for page in DOCS.rglob("*.md"))]:
        assert repository_path(site_path(path)) == path


def test_links_of_all_pages_lead_somewhere() -> None:
    """In the repository; on the site, `mkdocs build --strict` says so."""
    for path in [*PAGES, *(f"docs/{page.relative_to(DOCS)}" for page in DOCS.rglob("*.md"))]:
        text = re.sub(r"^```.*?^```$", "", (ROOT / path).read_text(), flags=re.M | re.S)
        targets = [match["target"] for match in site_pages.LINK.finditer(text)]
        assert len(linked(text, path)) == len(targets), path


def test_modules_that_pages_name_exist() -> None:
    """A path of a module is one of the repository or of the library, and a dotted name leads to something."""
    absent = []
    for path in [*PAGES, *(f"docs/{page.relative_to(DOCS)}" for page in DOCS.rglob("*.md"))]:
        text = (ROOT / path).read_text()
        for module in re.findall(r"`([\w./]+\.py)(?::\d+)?`", text):
            places = [ROOT / module, ROOT / "mcore_convert" / module]
            if module not in MEGATRONS and not any(place.is_file() for place in places):
                absent.append(f"{path}: {module}")
        for name in re.findall(r"`(mcore_convert(?:\.\w+)+)`", text):
            try:
                pkgutil.resolve_name(name)
            except (ImportError, AttributeError):
                absent += [] if name in (*ENTRY_POINTS, MANIFEST) else [f"{path}: {name}"]
    assert not absent


def test_paths_that_pages_name_exist() -> None:
    """Those within a folder of the repository or of the library; runs and checkpoints have paths of their own."""
    folders = [folder for base in (ROOT, LIBRARY) for folder in base.iterdir() if folder.is_dir()]
    named = [folder for folder in folders if folder.name not in ("checkpoints", "build")]
    absent = [
        f"{page.relative_to(ROOT)}: {path}"
        for page in WRITTEN
        for path in re.findall(r"`([\w.-]+/[\w./-]*)`", page.read_text())
        for folder in named
        if path.startswith(f"{folder.name}/") and not (folder.parent / path).exists()
    ]
    assert not absent


def test_options_that_pages_name_exist() -> None:
    """Each is one of a command, of a program of this repository, of Megatron-LM, or of a tool that is listed here."""
    programs = [*(ROOT / "benchmarks").glob("*.py"), ROOT / "tests/fuzz/__main__.py"]
    known = {option for text in map(Path.read_text, programs) for option in re.findall(r'"(--[\w-]+)"', text)}
    known |= {option for version in VERSIONS for row in rows(version) for option in row["flags"]}
    known |= options_of(get_command(app)) | OF_TOOLS
    absent = [
        f"{page.relative_to(ROOT)}: {option}"
        for page in WRITTEN
        for option in re.findall(r"(?<![\w-])--[a-z][\w-]*\w(?![\w-])", page.read_text())
        if option not in known
    ]
    assert not absent


def options_of(command: Any) -> set[str]:
    """Return the options of a command and of those below it."""
    options = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    return options.union(*map(options_of, getattr(command, "commands", {}).values()))


def test_the_table_of_the_source_has_every_room() -> None:
    """And that of training every module and folder, but for those that only start it."""
    page = (DOCS / "how-it-works.md").read_text()
    tree = page.partition("```text\nmcore_convert/\n")[2].partition("```")[0]
    rooms = {path.name for path in LIBRARY.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert not [room for room in rooms - {"__init__.py"} if not re.search(rf"(^|\W){re.escape(room)}", tree)]
    parts = {path.name for path in (ROOT / "train_entry").iterdir() if not path.name.startswith("__")}
    assert not [part for part in parts if f"`train_entry/{part}" not in page]


def test_a_linked_file_is_shown_in_full() -> None:
    page = source_page("mcore_convert/version.py")
    assert (ROOT / "mcore_convert/version.py").read_text() in page
    assert page.startswith("# mcore_convert/version.py\n\n````python\n")


def documented(page: Path) -> set[str]:
    return set(re.findall(r"^::: (\S+)$", page.read_text(), re.M))


def test_every_public_name_is_in_the_reference() -> None:
    assert documented(REFERENCE / "python.md") >= {f"mcore_convert.{name}" for name in mcore_convert.__all__} - {
        "mcore_convert.ConvertError"
    }
    kinds = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]
    assert documented(REFERENCE / "errors.md") == {f"mcore_convert.errors.{kind.__name__}" for kind in kinds}
    text = (REFERENCE / "families.md").read_text()
    assert not [name for name in spec.__all__ if not re.search(rf"\b{name}\b", text)]


@pytest.mark.parametrize("page", sorted(REFERENCE.glob("*.md")), ids=lambda page: page.name)
def test_python_in_the_reference_runs(page: Path) -> None:
    for code in re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.M | re.S):
        exec(code, {})


def test_decisions_are_numbered_and_listed() -> None:
    """Each has the three headings, its number is the next one, and the list has its title."""
    decisions = sorted((DOCS / "decisions").glob("0*.md"))
    listed = (DOCS / "decisions" / "README.md").read_text()
    for number, path in enumerate(decisions, 1):
        text = path.read_text()
        title = text.partition("\n")[0].removeprefix("# ")
        assert f"| [{number:04}]({path.name}) | {title} |" in listed
        assert re.findall(r"^## (\w+)$", text, re.M) == ["Context", "Decision", "Consequences"]
