"""Imports run one way, the library stays light, and its files stay small."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import mcore_convert
from tests.conftest import HfMaker

ROOT = Path(__file__).parents[1]
PACKAGES = ("mcore_convert", "converters", "train_entry")
HEAVY = ("torch", "transformers", "megatron", "accelerate", "huggingface_hub", "tokenizers")
LONGEST = 320  # lines of a file: one responsibility

# A module may import those of the lines above its own, and nothing else of the project. Names without a package are
# those of `mcore_convert`.
LAYERS = """
amounts  errors  folding  scale  version
marker
disk
spec.names  spec.neutral  spec.shard  spec.arguments
spec.config  spec.dims  spec.bridge  spec.command_line
spec.fields  spec.layout  spec.pack
spec.rope  spec.family
spec
converters.gpt2  converters.llama
converters
spec.gpt
tensors
ranks
gather
elements  formats  formats.base  formats.flat  formats.modules  formats.pickle_records  formats.safetensors_file
formats.pickle_budget
formats.pickles
spans
values
formats.module_buffers  formats.old_names  formats.pickle_writer  formats.zip_records
formats.old_classes  formats.torch_file
formats.dcp  formats.hf  formats.torch_tree
formats.torch_dist_keys  formats.torch_dist_training
formats.torch_dist_buckets
formats.torch_dist_optimizer
formats.torch_dist
formats.torch_dist_writer  formats.zarr
formats.mp_rank_files  formats.mp_rank_layout
formats.mp_rank_parameters
formats.mp_rank_optimizer  formats.mp_rank_optimizer_writer
formats.mp_rank_checkpoint
formats.mp_rank  formats.mp_rank_writer
families  plan
hf_tensors  runs
identify  readback
contents  targets
changes
conversion
beside  destination  reopening  checksums
execute
megatron  megatron.cpu  megatron.norm
megatron.checkpoint  megatron.config  megatron.logits  megatron.parallel  megatron.weights
megatron.model
verification  statistics  hub  tokenizer_files
logits  outliers  comparison  companions  card  hub_errors
inspection
page  page.curve  page.heat  page.layouts  page.render
page.pages
look
api  exports  streams  uploads
publish
sweep
mcore_convert
train_entry.config  train_entry.config.schema
train_entry.config.nearest
train_entry.config.files  train_entry.config.inputs  train_entry.config.layouts  train_entry.config.problems
train_entry.config.estimate  train_entry.config.overrides  train_entry.config.refusals
train_entry.config.compose
train_entry.flows.base
train_entry.flows.fine_tuning  train_entry.flows.pretraining
train_entry.flows
train_entry.data  train_entry.data.bin_idx  train_entry.data.chunks  train_entry.data.ranks  train_entry.data.sidecar
train_entry.data.microbatches  train_entry.data.mock  train_entry.data.splits  train_entry.data.tokenizer
train_entry.data.encode  train_entry.data.indexed  train_entry.data.sft_text  train_entry.data.sources
train_entry.data.prepare  train_entry.data.sft_tokens
train_entry.data.sft
train_entry.train_valid_test_datasets_provider
train_entry.report  train_entry.report.flops  train_entry.report.peak  train_entry.report.phases
train_entry.report.metrics  train_entry.report.profile
train_entry.report.rows
train_entry.report.console  train_entry.report.jsonl  train_entry.report.sink
train_entry.report.plot  train_entry.report.tensorboard  train_entry.report.wandb
train_entry.report.report
train_entry.model  train_entry.model.attention  train_entry.model.compiled  train_entry.model.kernels
train_entry.model.loss  train_entry.model.operations
train_entry.model.layers
train_entry.model.gpt
train_entry.optimizer.foreach
train_entry.model.choices
train_entry.state  train_entry.optimizer  train_entry.optimizer.torch_adam
train_entry.checkpoints.architecture  train_entry.checkpoints.carried  train_entry.checkpoints.folder
train_entry.checkpoints.optimizer_state  train_entry.checkpoints.random_state
train_entry.checkpoints.contents
train_entry.checkpoints.source
train_entry.arguments  train_entry.initial_weights  train_entry.initialize  train_entry.model_provider
train_entry.signals
train_entry.optimizer.build
train_entry.checkpoints.export  train_entry.checkpoints.ranks
train_entry.checkpoints.writer
train_entry.checkpoints.loading
train_entry.checkpoints.checkpoints
train_entry.checkpoints
train_entry.forward_step  train_entry.scopes
train_entry.schedule
train_entry.trainer
train_entry.pretrain
train_entry.__main__
train_entry
cli.interruption  cli.options  cli.text
cli.values
cli.convert  cli.data  cli.diff  cli.families  cli.inspect  cli.push  cli.verify
cli.export  cli.reshard  cli.train
cli
__main__
"""


def full_name(short: str) -> str:
    return short if short.partition(".")[0] in PACKAGES else f"mcore_convert.{short}"


def rank_of() -> dict[str, int]:
    lines = LAYERS.split("\n")
    return {full_name(short): rank for rank, line in enumerate(lines) for short in line.split()}


def files() -> dict[str, Path]:
    """Every module of the installed packages, by its name."""
    found = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            found[".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")] = path
    return found


MODULES = files()


def imported(module: str) -> Iterator[str]:
    """The modules of the project that a module imports, inside functions and for type checking too."""
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
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


def test_every_module_has_its_layer() -> None:
    assert sorted(rank_of()) == sorted(MODULES), "say in LAYERS where a new module stands"


def test_imports_run_one_way() -> None:
    rank = rank_of()
    wrong = [
        f"{module} imports {other}" for module in MODULES for other in imported(module) if rank[other] >= rank[module]
    ]
    assert not wrong


def test_families_are_found_and_not_imported() -> None:
    """No module names a family, so that another package can bring its own; and a family's file knows the spec alone."""
    for module in MODULES:
        family = is_in(module, "converters")
        room = (
            ("mcore_convert.spec", "mcore_convert.errors", "converters") if family else ("mcore_convert", "train_entry")
        )
        assert [other for other in imported(module) if not any(is_in(other, package) for package in room)] == [], module


def is_light(module: str) -> bool:
    """Whether a module is one that must not bring torch in. Training has torch in all but its configuration."""
    training = is_in(module, "train_entry") and module != "train_entry" and not is_in(module, "train_entry.config")
    return not training and "megatron" not in module and not module.endswith("__main__")


@pytest.mark.parametrize("module", [m for m in sorted(MODULES) if is_light(m)])
def test_a_module_can_be_imported_first(module: str) -> None:
    """No order of imports closes a circle, and none of these modules brings torch in."""
    assert loaded(f"import {module}") == []


def loaded(code: str) -> list[str]:
    """Which heavy packages a fresh interpreter has loaded after running this."""
    report = f"\nimport sys, json\nsys.stderr.write(json.dumps([name for name in {HEAVY} if name in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code + report], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stderr.splitlines()[-1])
    return found


def command(*arguments: str) -> str:
    """Code that runs a command of `mcore-convert` to its end."""
    return f"""
import sys
from mcore_convert.cli import main
sys.argv = ["mcore-convert", *{list(arguments)}]
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
"""


def test_a_conversion_loads_neither_torch_nor_transformers_nor_megatron(hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    source, dist, back = str(hf_checkpoint("llama-gqa")), str(tmp_path / "dist"), str(tmp_path / "back")
    assert loaded(command("--help")) == []
    assert loaded(command("families", "llama")) == []
    assert loaded(command("convert", source, dist, "--tp", "2")) == []
    assert loaded(command("inspect", dist, "--stats")) == []
    assert loaded(command("convert", dist, back)) == []
    assert loaded(command("verify", source, back)) == []
    assert loaded(command("export", dist, "--dtype", "bfloat16", "--overwrite")) == ["huggingface_hub"]
    assert loaded(command("diff", source, back)) == []
    ranks, whole = str(tmp_path / "ranks"), str(tmp_path / "whole")
    assert loaded(command("reshard", dist, ranks, "--to", "torch", "--tp", "2", "--pp", "2")) == []
    assert loaded(command("reshard", ranks, whole)) == []
    assert loaded(command("inspect", ranks)) == []


def test_a_configuration_loads_neither_torch_nor_transformers_nor_megatron() -> None:
    assert loaded(command("train", "--list")) == []
    assert loaded(command("train", "tiny-gpt2", "parallel=tp2", "--print-config")) == []


def test_the_public_names() -> None:
    kinds = ["Comparison", "Conversion", "ConvertError", "Export", "Inspection", "Swept", "Upload", "Verification"]
    functions = ["convert", "diff", "export", "export_all", "inspect", "iter_hf_weights", "load_hf_model", "push"]
    names = [*kinds, *functions, "reshard", "verify"]
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


@pytest.mark.parametrize("module", sorted(MODULES))
def test_nothing_prints(module: str) -> None:
    """Data goes through the command's own writer, and the library says nothing."""
    tree = ast.parse(MODULES[module].read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert not [call.lineno for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"]
