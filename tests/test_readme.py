"""What README.md and docs/ show is run: every console block with its output, every Python block, and the demo."""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fixtures.hf import make_hf
from fixtures.hub import Hub, Token, running_hub
from fixtures.run import make_run
from fixtures.tokenizer import END, stories

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).parents[1]
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
    "torchrun ",
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
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The Hub that commands talk to, as `ada`."""
    with running_hub() as found:
        found.tokens["hf_ada"] = Token("ada")
        settings = {"HF_ENDPOINT": found.url, "HF_TOKEN": "hf_ada", "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        yield found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_shows_is_so(page: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if page.name == "export.md":
        request.getfixturevalue("hub")
        make_run(tmp_path / "run", [1000, 2000], name="llama-gqa")
        make_hf("llama-gqa", tmp_path / "tiny-llama", fill="normal")
    if page.name == "README.md":
        make_what_the_readme_finds(tmp_path)
    if page.name in ("README.md", "reshard.md"):
        make_runs_of_ranks(tmp_path)
    if page.name in ("README.md", "look.md"):
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
                run(command, expected, tmp_path)
        elif block.mark is None and block.kind == "python":
            run(f"python - <<'END'\n{block.body}\nEND", ["..."], tmp_path)


def make_what_the_readme_finds(folder: Path) -> None:
    """The model that `make demo` leaves, a checkpoint that Megatron saved, and a model that is refused."""
    import json

    from fixtures.megatron import save_torch_dist
    from mcore_convert.identify import identify
    from mcore_convert.logits import tensors_of

    source = make_hf("llama-gqa", folder / "tiny-llama", fill="normal", shards=2)
    padded = make_hf("llama-gqa", folder / "padded", fill="normal", config={"vocab_size": 512}, tokenizer=False)
    model = identify(padded)
    weights = {name: tensor.clone() for name, tensor in tensors_of(model)}
    args = {**model.args, "vocab_size": None, "padded_vocab_size": 512, "tokenizer_type": "HuggingFaceTokenizer"}
    save_torch_dist(args, weights, folder / "run", common="common_state", iteration=5000)
    yarn = make_hf("llama-gqa", folder / "yarn-llama", tokenizer=False)
    config = json.loads((source / "config.json").read_text())
    config.pop("rope_parameters")
    config |= {"rope_theta": 10000.0, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "mlp_bias": True}
    (yarn / "config.json").write_text(json.dumps(config))


def make_before_and_after(folder: Path) -> None:
    """A model, a run that went on from it, its deeper layers further, and a run in which something is wrong."""
    import math

    import torch
    from safetensors.torch import load_file

    from mcore_convert import convert

    before = make_hf("llama-gqa", folder / "before", fill="normal", config={"num_hidden_layers": 8}, tokenizer=False)
    tensors = load_file(before / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        layer = int(name.split(".")[2]) if ".layers." in name else 0
        tensor += torch.randn(tensor.shape, generator=generator) * 1e-3 * 1.5**layer
    save_model(before, folder / "after-hf", tensors)
    convert(folder / "after-hf", folder / "after/checkpoints", to="torch_dist", tp=2, pp=2, iteration=5000)
    lines = [f'{{"iteration": {n}, "loss": {2 + 8 * 0.999**n:.5f}}}' for n in range(1, 5001)]
    (folder / "after/metrics.jsonl").write_text("\n".join(lines) + "\n")
    tensors["model.layers.3.mlp.down_proj.weight"][5, 7] = math.nan
    tensors["model.layers.6.mlp.up_proj.weight"] *= 8
    tensors["model.layers.2.self_attn.v_proj.weight"][4:8] = 0
    save_model(before, folder / "broken", tensors)


def save_model(like: Path, folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """A directory with the configuration of another, and these weights."""
    import shutil

    from safetensors.torch import save_file

    shutil.copytree(like, folder)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def make_texts(folder: Path) -> None:
    """Stories, a JSON object on each line, and a tokenizer."""
    import json

    from fixtures.tokenizer import make_tokenizer

    (folder / "stories.jsonl").write_text("".join(json.dumps({"text": story}) + "\n" for story in stories()))
    make_tokenizer(folder / "tokenizer", 512, max_length=256)


def make_runs_of_ranks(folder: Path) -> None:
    """What Megatron saved in the format `torch` at TP2 x PP2, and a model in the form of `megatron_lm_345m`."""
    import torch

    from fixtures.mp_rank import save_mp_rank
    from fixtures.old_classes import save_345m
    from fixtures.optimizer import random_state
    from mcore_convert.identify import identify
    from tests.ranks import run_ranks
    from tests.test_old_classes import GPT, gpt2

    args = {**identify(make_hf("llama-gqa", folder / "model", tokenizer=False)).args, "padded_vocab_size": 512}
    state = random_state(args)

    def save() -> None:
        options = {"tp": 2, "pp": 2, "dtype": torch.bfloat16, "iteration": 5000}
        save_mp_rank(args, state, folder / "old-run", optimizer="distributed", **options)  # type: ignore[arg-type]

    run_ranks(4, save)
    save_345m(folder / "megatron_lm_345m", gpt2().state_dict(), GPT)


def install(pyproject: Path) -> None:
    """What `pip install --editable` makes of a project: metadata with its entry points, in a folder of the path."""
    project = tomllib.loads(pyproject.read_text())["project"]
    info = pyproject.parent / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = project["entry-points"].items()
    lines = [line for group, names in groups for line in (f"[{group}]", *(f"{k} = {v}" for k, v in names.items()))]
    (info / "entry_points.txt").write_text("\n".join(lines))


def run(command: str, expected: list[str], folder: Path) -> None:
    """Run a command and compare what it prints; one that prints an error must fail, any other must not."""
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=os.environ
        | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": f"{folder}:{ROOT}",  # this source, wherever the command is installed from
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
    """Whether lines are as expected. A line `...` is any lines, ` ... ` any words; rounding errors may differ."""
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


def test_the_tree_in_the_readme_is_the_tree() -> None:
    """Every path in it exists, and every module of the library is in it."""
    tree = next(block.body for block in blocks_of(ROOT / "README.md") if block.body.startswith("mcore_convert/"))
    shown = set()
    parents: list[str] = []
    for line in tree.splitlines():
        names = re.match(r"( *)([^\s,]+(?:, [^\s,]+)*)", line)
        assert names is not None, line
        depth = len(names[1]) // 2
        for name in names[2].split(", "):
            path = "".join([*parents[:depth], name])
            assert (ROOT / path).exists(), path
            shown.add(path.rstrip("/"))
        parents[depth:] = [names[2]]
    library = {str(p.relative_to(ROOT)) for p in (ROOT / "mcore_convert").rglob("*.py") if p.name != "__init__.py"}
    absent = {path for path in library if path not in shown and str(Path(path).parent) not in shown_whole(shown)}
    assert not absent


def shown_whole(shown: set[str]) -> set[str]:
    """Folders that the tree shows as one line."""
    return {path for path in shown if not any(other.startswith(f"{path}/") for other in shown)}


def test_the_demo_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """`make demo`, with a model that has not learned much."""
    from fixtures import demo

    monkeypatch.setattr(demo, "STEPS", 12)
    folder = tmp_path / "demo_output"
    assert demo.main(folder) == 0
    shown, said = capfd.readouterr()
    assert shown.count("$ mcore-convert ") == 6
    assert shown.count("$ torchrun ") == 1
    assert shown.count("\nequal\n") == 2
    assert "step 12/12" in said
    assert "Traceback" not in said
    assert "Warning" not in said
    assert demo.PROMPT in shown
    left = {path.name for path in folder.iterdir()}
    assert left >= {"stories.yaml", "stories-run", "one-rank", "story-gpt2", "tiny-llama"}
    assert (folder / "stories-run" / "loss.png").stat().st_size > 10_000
