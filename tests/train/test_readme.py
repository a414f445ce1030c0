"""Examples of README.md and docs/ are run: every console block with its output, every Python block, and the demo.

The README's run in what the demo leaves, as it says.
"""

from __future__ import annotations

import difflib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from fixtures import demo
from fixtures.hf import make_hf
from fixtures.hub import Token, running_hub
from fixtures.run import make_run
from fixtures.subjects import make_before_and_after, make_models, make_old_run, make_yarn
from fixtures.tokenizer import END, stories
from tests.kinds import ROOT
from tests.unit.test_imports import MODULES, ROOMS, room_of
from tests.warm import commands, environment

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDER = "/data"  # how a page writes the folder that its commands run in

# A block of a page, with the HTML comment before it that says what it is:
#   <!-- not run: REASON -->   it needs the network, a GPU or minutes
#   <!-- file: NAME -->        the content of a file that the commands after it need
#   <!-- from: PATH -->        an excerpt of a file of this repository
BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>not run|file|from): (?P<value>[^\n]+) -->\n)?^```(?P<kind>\w+)\n(?P<body>.*?)^```$", re.M | re.S
)
NOT_RUN = (
    "git clone ",
    "make ",
    "cd demo_output ",
    "pip install ",
    "uvx ",
    "mcore-convert --install-completion",
    "mcore-convert --show-completion",
    "mcore-convert convert tiny-llama mcore --tp 2 --quiet -v",
    "torchrun ",
    "xargs torchrun ",
    "export FSSPEC_S3_",
    "mcore-convert inspect s3://",
    "mcore-convert reshard s3://",
    "mcore-convert verify s3://",
    "mcore-convert convert meta-llama/",
    "mcore-convert data prepare ",
    "transformers serve ",
    "mcore-convert push ",
    "mcore-convert export stories-run ",
    "curl ",
)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, what the comment before it says, and its text."""

    kind: str
    mark: str | None
    value: str
    body: str

    @property
    def commands(self) -> Iterator[tuple[str, list[str]]]:
        """Each command, which begins with `$ `, and the output that stands below it."""
        for part in re.split(r"^\$ ", self.body, flags=re.M)[1:]:
            lines = part.rstrip("\n").split("\n")
            last = next(number for number, line in enumerate(lines) if not line.endswith("\\"))
            yield "\n".join(lines[: last + 1]), lines[last + 1 :]


def blocks_of(page: Path) -> list[Block]:
    return [Block(b["kind"], b["mark"], b["value"] or "", b["body"]) for b in BLOCK.finditer(page.read_text())]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Commands that talk to a Hub, as `ada`."""
    with running_hub() as result:
        result.tokens["hf_ada"] = Token("ada")
        settings = {"HF_ENDPOINT": result.url, "HF_TOKEN": "hf_ada", "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        with commands(tmp_path_factory.mktemp("warm"), settings) as folder:
            yield folder


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_shows_is_so(page: Path, tmp_path: Path, warm: Path, request: pytest.FixtureRequest) -> None:
    if page.name == "export.md":
        warm = request.getfixturevalue("hub")
        make_run(tmp_path / "run", [1000, 2000], name="llama-gqa")
        make_hf("llama-gqa", tmp_path / "tiny-llama", fill="normal")
    if page.name == "README.md":
        tmp_path = demo_output(tmp_path, warm)
    if page.name in ("add-a-format.md", "command-line.md", "load-in-megatron.md", "manifest.md"):
        make_hf("llama-gqa", tmp_path / "tiny-llama", fill="normal")
    if page.name == "add-a-format.md":
        shutil.copy(ROOT / "tests/trial_format.py", tmp_path)
    if page.name == "convert.md":
        make_models(tmp_path)
        make_old_run(tmp_path)
    if page.name == "limits.md":
        make_yarn(tmp_path)
    if page.name == "scale.md":
        make_old_run(tmp_path)
    if page.name == "reshard.md":
        make_old_run(tmp_path)
        make_345m(tmp_path)
    if page.name == "inspect.md":
        make_before_and_after(tmp_path)
    if page.name == "train.md":
        make_texts(tmp_path)
    if page.name == "data.md":
        make_hf("gpt2", tmp_path / "tiny-gpt2", fill="normal")
        (tmp_path / "stories.txt").write_text(f"\n{END}\n".join(stories()))
    for block in blocks_of(page):
        if block.mark == "file":
            file = tmp_path / block.value
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.body)
            if file.name == "pyproject.toml":
                install(file)
        elif block.mark == "from":
            assert block.body in (ROOT / block.value).read_text(), f"{block.value} has changed"
        elif block.mark is None and block.kind == "console":
            for command, expected in block.commands:
                run(command, expected, tmp_path, warm)
        elif block.mark is None and block.kind == "python":
            run(f"python - <<'END'\n{block.body}\nEND", ["..."], tmp_path, warm)


def demo_output(folder: Path, warm: Path) -> Path:
    """Return what `make demo` leaves, with a model that has not learned much: where what the README shows is run."""
    left = folder / "demo_output"
    done = subprocess.run(
        [warm / "python", "-m", "fixtures.demo", left, "12"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**environment(warm), "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("$ mcore-convert ") == 6
    assert done.stdout.count("$ torchrun ") == 1
    assert done.stdout.count("\nequal\n") == 2
    assert "step 12/12" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Warning" not in done.stderr
    assert demo.PROMPT in done.stdout
    listed = done.stdout.partition("Left in")[2]
    for name in sorted(path.name for path in left.iterdir()):
        known = name.startswith(("stories", "tokenizer")) or f"{name}/" in listed
        assert known, f"the demo leaves `{name}` and says nothing of it"
    assert (left / "stories-run" / "loss.png").stat().st_size > 10_000
    return left


def make_texts(folder: Path) -> None:
    """Stories, a JSON object on each line, and a tokenizer."""
    import json

    from fixtures.tokenizer import make_tokenizer

    (folder / "stories.jsonl").write_text("".join(json.dumps({"text": story}) + "\n" for story in stories()))
    make_tokenizer(folder / "tokenizer", 512, max_length=256)


def make_345m(folder: Path) -> None:
    """Make a model in the form of `megatron_lm_345m`."""
    from fixtures.old_classes import save_345m
    from tests.oracle.test_old_classes import GPT, gpt2

    save_345m(folder / "megatron_lm_345m", gpt2().state_dict(), GPT)


def install(pyproject: Path) -> None:
    """Do what `pip install --editable` makes of a project: metadata with its entry points, in a folder of the path."""
    project = tomllib.loads(pyproject.read_text())["project"]
    info = pyproject.parent / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = project["entry-points"].items()
    lines = [line for group, names in groups for line in (f"[{group}]", *(f"{k} = {v}" for k, v in names.items()))]
    (info / "entry_points.txt").write_text("\n".join(lines))


def run(command: str, expected: list[str], folder: Path, start: Path) -> None:
    """Run a command and compare what it prints; one that prints an error must fail, any other must not.

    Args:
        start: a folder whose commands come before those that are installed.
    """
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=os.environ
        | {
            "PATH": os.pathsep.join([str(start), str(Path(sys.executable).parent), os.environ["PATH"]]),
            # this source, wherever the command is installed from
            "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "PYTHON_EXEC": str(start / "python"),  # torchrun's, for its ranks
            "PYTHONUNBUFFERED": "1",  # so that messages stand among the data, as on a terminal
            "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    shown = done.stdout.replace(str(folder), FOLDER)
    if "HF_ENDPOINT" in os.environ:
        shown = shown.replace(os.environ["HF_ENDPOINT"], "https://huggingface.co")
    lines = [line.rstrip() for line in shown.split("\n")]
    if lines[-1] == "":
        lines.pop()
    if not matches(lines, expected):
        difference = "\n".join(difflib.unified_diff(expected, lines, "the page", "the command", lineterm=""))
        pytest.fail(f"$ {command}\n{difference}")
    fails = any(line.startswith("error:") for line in expected)
    differs = re.match(r"mcore-convert diff", command) is not None  # no page shows two that are equal
    assert (done.returncode != 0) == (fails or differs), f"$ {command}\nexit code {done.returncode}\n{done.stdout}"


def matches(lines: list[str], expected: list[str]) -> bool:
    """Return whether lines are as expected. A line `...` is any lines, ` ... ` any words;
    rounding errors may differ.
    """
    pattern = ""
    for line in expected:
        if line.strip() == "...":
            pattern += r"(?:.*\n)*"
        else:
            words = re.split(r" \.\.\.(?= |$)", without_rounding(line))
            pattern += "(?: .*)?".join(map(re.escape, words)) + r"\n"
    return re.fullmatch(pattern, "".join(f"{without_rounding(line)}\n" for line in lines)) is not None


def without_rounding(line: str) -> str:
    return re.sub(r"differ by at most \S+,", "differ by at most #,", line)


def test_little_is_left_out() -> None:
    """What is not run says why, and is of a few known kinds whose targets exist."""
    makefile = (ROOT / "Makefile").read_text()
    for page in PAGES:
        for block in blocks_of(page):
            if block.mark == "not run":
                assert block.kind == "console", block.body
                for command, _ in block.commands:
                    assert command.startswith(NOT_RUN), command
                    target = re.match(r"make (\w+)", command)
                    assert target is None or f"\n{target[1]}:" in makefile, command


def test_blocks_are_seen() -> None:
    """No block escapes: every fence of a page opens or closes one, and a plain one shows no command."""
    for page in PAGES:
        fences = re.findall(r"^ *```", page.read_text(), re.M)
        assert len(fences) == 2 * len(blocks_of(page)), page.name
        assert {block.kind for block in blocks_of(page)} <= {"console", "python", "toml", "text"}, page.name
        assert not [b for b in blocks_of(page) if b.kind == "text" and "$ " in b.body], page.name


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            assert "://" in target or (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_readme_is_short() -> None:
    assert 150 <= len((ROOT / "README.md").read_text().splitlines()) <= 200


def test_the_tree_of_the_source_is_the_tree() -> None:
    """Every path in it exists, every module of the library or its folder is in it, and rooms stand as they import."""
    page = ROOT / "docs" / "how-it-works.md"
    tree = next(block.body for block in blocks_of(page) if block.body.startswith("mcore_convert/"))
    shown: list[str] = []
    parents: list[str] = []
    for line in tree.splitlines():
        names = re.match(r"( *)([^\s,]+(?:, [^\s,]+)*)", line)
        assert names is not None, line
        depth = len(names[1]) // 2
        for name in names[2].split(", "):
            path = "".join([*parents[:depth], name])
            assert (ROOT / path).exists(), path
            shown.append(path.rstrip("/"))
        parents[depth:] = [names[2]]
    library = {p.relative_to(ROOT) for p in (ROOT / "mcore_convert").rglob("*.py") if p.name != "__init__.py"}
    absent = {path for path in library if not {str(path), *map(str, path.parents)} & set(shown) - {"mcore_convert"}}
    assert not absent
    rooms = [room_of(path.removesuffix(".py").replace("/", ".")) for path in shown if path.count("/") == 1]
    rank = {room: number for number, line in enumerate(ROOMS.split("\n")) for room in line.split()}
    assert rooms == sorted(rooms, key=rank.__getitem__)
    assert set(rooms) == {room_of(module) for module in MODULES if module.startswith("mcore_convert.")}
