"""Imports run one way, the library stays light, and its files stay small."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import mcore_convert
from mcore_convert.formats.registry import formats
from tests.conftest import HfMaker
from tests.kinds import ROOT

PACKAGES = ("mcore_convert", "converters", "train_entry")
HEAVY = ("torch", "transformers", "megatron", "accelerate", "huggingface_hub", "tokenizers")
LONGEST = 320  # lines of a file: one responsibility

# A module may import those of its own room and of the rooms in the lines above it. A room is a folder, or a file beside
# the folders; names without a package are those of `mcore_convert`. Within a room no imports close a circle.
ROOMS = """
errors  text  version
spec
converters  storage
options  plugins
formats
checkpoints
conversion
megatron
comparison
inspection
publishing
api
mcore_convert
train_entry
cli
__main__
"""

# Who may name a format: the formats themselves. The training entry saves and loads with Megatron Core's own functions,
# which write `torch_dist` and nothing else. Megatron's command line has a flag of its own for formats.
NAMES_FORMATS = ("mcore_convert.formats", "train_entry.checkpoints", "mcore_convert.spec.config.flags")
# What all formats share, in `mcore_convert.formats`.
SHARED = ("base", "format", "random_states", "registry", "request", "traits", "files", "megatron")


def files() -> dict[str, Path]:
    """Return every module of the installed packages, by its name."""
    result = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            result[".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")] = path
    return result


MODULES = files()


@cache
def nodes(module: str) -> list[ast.AST]:
    """Return the nodes of a module that tests look at; the whole trees of all would be millions of objects."""
    tree = ast.parse(MODULES[module].read_text())
    return [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom | ast.Compare | ast.Call)]


@cache
def imported(module: str) -> tuple[str, ...]:
    """Return the modules of the project that a module imports, inside functions and for type checking too."""
    return tuple(_imported(module))


def _imported(module: str) -> Iterator[str]:
    for node in nodes(module):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively"
            base = node.module or ""
            names = [f"{base}.{a.name}" if f"{base}.{a.name}" in MODULES else base for a in node.names]
        else:
            continue
        yield from (name for name in names if name.partition(".")[0] in PACKAGES)


def is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def room_of(module: str) -> str:
    package, _, rest = module.partition(".")
    return package if package != "mcore_convert" or not rest else rest.partition(".")[0]


def test_imports_run_one_way() -> None:
    rank = {room: number for number, line in enumerate(ROOMS.split("\n")) for room in line.split()}
    assert {room_of(module) for module in MODULES} == set(rank), "say in ROOMS where a new room stands"
    wrong = [
        f"{module} imports {other}"
        for module in MODULES
        for other in imported(module)
        if room_of(other) != room_of(module) and rank[room_of(other)] >= rank[room_of(module)]
    ]
    assert not wrong


def test_no_imports_close_a_circle() -> None:
    """A package's own file stands for its name alone: it may import its modules, and they do not import it."""
    graph = {module: {other for other in imported(module) if other != module} for module in MODULES}
    order = TopologicalSorter(graph)
    try:
        order.prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' -> '.join(error.args[1])}")


def concrete_format(module: str) -> bool:
    return module.startswith("mcore_convert.formats.") and module.split(".")[2] not in SHARED


def test_only_formats_know_a_format() -> None:
    """Outside of them no module imports one, and none compares with a format's name."""
    imports, compares = [], []
    names = set(formats())
    for module in MODULES:
        if any(is_in(module, room) for room in NAMES_FORMATS):
            continue
        imports += [f"{module} imports {other}" for other in imported(module) if concrete_format(other)]
        for node in nodes(module):
            if isinstance(node, ast.Compare):
                sides = [node.left, *node.comparators]
                texts = {part.value for side in sides for part in ast.walk(side) if isinstance(part, ast.Constant)}
                compares += [f"{module}:{node.lineno}" for text in texts if text in names]
    assert not imports
    assert not compares


def test_families_are_found_and_not_imported() -> None:
    """No module names a family, so that another package can bring its own; and a family's file knows the spec alone."""
    for module in MODULES:
        family = is_in(module, "converters")
        room = (
            ("mcore_convert.spec", "mcore_convert.errors", "converters") if family else ("mcore_convert", "train_entry")
        )
        assert [other for other in imported(module) if not any(is_in(other, package) for package in room)] == [], module


def is_light(module: str) -> bool:
    """Return whether a module is one that must not bring torch in. Training has torch in all but its configuration."""
    training = is_in(module, "train_entry") and module != "train_entry" and not is_in(module, "train_entry.config")
    return not training and "megatron" not in module and not module.endswith("__main__")


@pytest.mark.slow
def test_light_modules_bring_nothing_heavy_in() -> None:
    """All of them together, so none of them. Each can be imported first: no imports close a circle."""
    modules = [module for module in sorted(MODULES) if is_light(module)]
    assert loaded("".join(f"import {module}\n" for module in modules)) == []


def loaded(code: str) -> list[str]:
    """Return which heavy packages a fresh interpreter has loaded after running this."""
    report = f"\nimport sys, json\nsys.stderr.write(json.dumps([name for name in {HEAVY} if name in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code + report], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    result: list[str] = json.loads(done.stderr.splitlines()[-1])
    return result


def commands(*lines: list[str]) -> str:
    """Return code that runs commands of `mcore-convert` to their ends, one after another."""
    return f"""
import sys
from mcore_convert.cli import main
for words in {list(lines)}:
    sys.argv = ["mcore-convert", *words]
    try:
        main()
    except SystemExit as end:
        assert not end.code, (words, end.code)
"""


@pytest.mark.slow
def test_a_conversion_loads_neither_torch_nor_transformers_nor_megatron(hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    source, dist, back = str(hf_checkpoint("llama-gqa")), str(tmp_path / "dist"), str(tmp_path / "back")
    ranks, whole = str(tmp_path / "ranks"), str(tmp_path / "whole")
    lines = [
        ["--help"],
        ["families", "llama"],
        ["convert", source, dist, "--tp", "2"],
        ["inspect", dist, "--stats"],
        ["convert", dist, back],
        ["verify", source, back],
        ["diff", source, back],
        ["reshard", dist, ranks, "--to", "torch", "--tp", "2", "--pp", "2"],
        ["reshard", ranks, whole],
        ["inspect", ranks],
        ["train", "--list"],
        ["train", "tiny-gpt2", "parallel=tp2", "--print-config"],
    ]
    assert loaded(commands(*lines)) == []
    assert loaded(commands(["export", dist, "--dtype", "bfloat16", "--overwrite"])) == ["huggingface_hub"]


def test_the_public_names() -> None:
    kinds = ["Comparison", "Conversion", "ConvertError", "Export", "Inspection", "Integrity", "Swept"]
    functions = ["convert", "diff", "export", "export_all", "inspect", "iter_hf_weights", "load_hf_model", "push"]
    names = [*kinds, "Upload", "Verification", *functions, "reshard", "verify", "verify_files"]
    assert mcore_convert.__all__ == names
    assert dir(mcore_convert) == sorted([*names, "__version__"])
    for name in names:
        assert getattr(mcore_convert, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute `reshape`"):
        _ = mcore_convert.reshape


@pytest.mark.parametrize("package", [*PACKAGES, "fixtures", "benchmarks"])
def test_files_stay_small(package: str) -> None:
    long = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in (ROOT / package).rglob("*.py")}
    assert not {file: lines for file, lines in long.items() if lines > LONGEST}


def test_nothing_prints() -> None:
    """Data goes through the command's own writer, and the library says nothing."""
    calls = [(module, node) for module in MODULES for node in nodes(module) if isinstance(node, ast.Call)]
    names = [(module, call.lineno, call.func.id) for module, call in calls if isinstance(call.func, ast.Name)]
    assert len(names) > 1000
    assert not [f"{module}:{line}" for module, line, name in names if name == "print"]
