"""Checkpoints of a run: saved, it is what Megatron Core would save; resumed, it goes on as if it had never stopped."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from fixtures.megatron import random_weights
from fixtures.training import Form, Step
from fixtures.training import train as train_as_megatron
from mcore_convert import ConvertError, convert, inspect, reshard, verify
from mcore_convert.spec.layout import Layout
from tests.ranks import run_ranks
from tests.saved_runs import SEVERAL_BUCKETS, SMALL, Outcome, config_of, trained
from tests.wide import matrix
from train_entry.checkpoints.optimizer_state import own_master_key, tensors_of
from train_entry.config.schema import Config

SAVED_AT, UNTIL = 2, 5
TOLERANCE = 1e-5
TIED = {**SMALL, "swiglu": False, "untie_embeddings_and_output_weights": False, "normalization": "LayerNorm"}
EXPERTS = {**SMALL, "num_experts": 4, "moe_ffn_hidden_size": 48, "moe_router_topk": 2, "moe_router_pre_softmax": True}

# A run: its model, its layout, its ranks, whether its optimizer is the distributed one, and its precision.
RUNS: dict[str, tuple[dict[str, Any], Layout, int, bool, torch.dtype]] = {
    "plain": (SMALL, Layout(tp=2, pp=2), 4, False, torch.float32),
    "distributed": ({**SMALL, **SEVERAL_BUCKETS}, Layout(tp=2), 4, True, torch.float32),
    "plain-bf16": (SMALL, Layout(tp=2), 2, False, torch.bfloat16),
    "distributed-bf16": ({**SMALL, **SEVERAL_BUCKETS}, Layout(), 2, True, torch.bfloat16),
    "tied": (TIED, Layout(pp=2), 4, True, torch.float32),
    "experts": (EXPERTS, Layout(ep=2), 2, True, torch.float32),
}


class Original:
    """A run that was never interrupted, and the directory in which it saved itself on its way."""

    def __init__(self, name: str, path: Path) -> None:
        self.args, self.layout, self.ranks, self.distributed, self.dtype = RUNS[name]
        self.path = path
        self.steps = self.goes_on(
            path, until=UNTIL, save_at=[SAVED_AT], weights=random_weights({**self.args, "num_layers": 4})
        ).steps

    def goes_on(self, run_dir: Path, *, layout: Layout | None = None, **options: Any) -> Outcome:
        """Return the same run from another place, or at another layout."""
        there, ranks = (self.layout, self.ranks) if layout is None else (layout, None)
        checkpoint = {name: options.pop(name) for name in ("load", "asynchronous") if name in options}
        distributed = options.pop("distributed", self.distributed)
        config = config_of(run_dir, distributed=distributed, tp=there.tp, **checkpoint)
        return trained(self.args, there, config, ranks=ranks, dtype=self.dtype, **{"until": UNTIL, **options})

    def by_megatron(self, **options: Any) -> list[list[Step]]:
        """Return the steps that Megatron Core takes from the checkpoint on, on each rank."""
        there: dict[str, Any] = {
            "distributed": self.distributed,
            "dtype": self.dtype,
            "load": self.path / "checkpoints",
        }
        return run_ranks(self.ranks, lambda: train_as_megatron(self.args, self.layout, **there, **options))

    @property
    def rest(self) -> list[Step]:
        """The steps after the checkpoint."""
        return self.steps[SAVED_AT:]

    @property
    def checkpoint(self) -> Path:
        return self.path / f"checkpoints/iter_{SAVED_AT:07d}"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Original]:
    made: dict[str, Original] = {}

    def run(name: str) -> Original:
        if name not in made:
            made[name] = Original(name, tmp_path_factory.mktemp(name))
        return made[name]

    return run


def furthest(actual: list[Step], wanted: list[Step]) -> float:
    return max(abs(f.loss - w.loss) for f, w in zip(actual, wanted, strict=True))


@pytest.mark.parametrize("name", matrix(((name,) for name in RUNS), thin=lambda name: name != "plain-bf16"))
def test_a_resumed_run_is_bit_equal(name: str, original: Callable[[str], Original]) -> None:
    run = original(name)
    result = run.goes_on(run.path)
    assert result.restored.path == run.checkpoint
    assert result.restored.training
    assert result.restored.notes == ()
    assert result.steps == run.rest


def test_written_in_the_background_it_is_the_same(original: Callable[[str], Original], tmp_path: Path) -> None:
    """While the next steps change what is being written."""
    run = original("distributed-bf16")
    first = run.goes_on(tmp_path, load=run.path, save_at=[3, 4], asynchronous=True)
    assert first.steps == run.rest
    assert run.goes_on(tmp_path).steps == run.rest[4 - SAVED_AT :]
    assert verify(tmp_path / "checkpoints/iter_0000003", tmp_path / "checkpoints/iter_0000004").equal is False


@pytest.mark.parametrize(
    ("name", "layout", "distributed"),
    matrix(
        [
            ("plain", Layout(), True),
            ("plain", Layout(pp=2, vpp=2), False),
            ("distributed", Layout(pp=2), False),
            ("tied", Layout(tp=2), False),
            ("experts", Layout(), False),
        ],
        thin=lambda name, layout, distributed: layout != Layout() or name == "experts",
    ),
    ids=str,
)
def test_it_goes_on_at_another_layout(
    name: str, layout: Layout, distributed: bool, original: Callable[[str], Original], tmp_path: Path
) -> None:
    """And with the other optimizer: the plain one's state fits the distributed one, and the other way around."""
    run = original(name)
    result = run.goes_on(tmp_path, load=run.path, layout=layout, distributed=distributed)
    assert result.restored.notes == (
        "random streams start anew: they belong to the layout that the checkpoint was written at",
    )
    assert furthest(result.steps, run.rest) < TOLERANCE
    assert [each.lr for each in result.steps] == [each.lr for each in run.rest]


@pytest.mark.parametrize("name", [pytest.param("plain-bf16", marks=pytest.mark.wide), "distributed-bf16"])
def test_in_fp32_it_goes_on_from_the_master_copies(
    name: str, original: Callable[[str], Original], tmp_path: Path
) -> None:
    """Not from the weights, which are rounded. A step at a learning rate of zero leaves them as they were loaded."""
    run = original(name)
    with mock.patch("fixtures.training.LR", 0.0), mock.patch("fixtures.training.MIN_LR", 0.0):
        trained(SMALL, Layout(), config_of(tmp_path, load=run.path), until=SAVED_AT + 1, save_at=[SAVED_AT + 1])
    master = "param" if run.distributed else "fp32_param"
    for key in ("decoder.final_layernorm.weight", "decoder.layers.mlp.linear_fc1.weight"):
        wanted = stored(run.checkpoint, f"optimizer.state.{master}.{key}")
        assert torch.equal(stored(tmp_path / f"checkpoints/iter_{SAVED_AT + 1:07d}", key), wanted)
        assert not torch.equal(stored(run.checkpoint, key).float(), wanted)


def stored(path: Path, key: str) -> Tensor:
    """Return a whole tensor, by torch's own reader."""
    meta = dcp.FileSystemReader(path).read_metadata().state_dict_metadata[key]
    assert isinstance(meta, TensorStorageMetadata)
    tensor = torch.empty(meta.size, dtype=meta.properties.dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load({key: tensor}, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    return tensor


@pytest.mark.parametrize("name", [pytest.param("plain-bf16", marks=pytest.mark.wide), "distributed", "experts"])
def test_megatrons_own_loading_goes_on_from_it(name: str, original: Callable[[str], Original]) -> None:
    """The oracle of the format: Megatron Core asks for what it knows, and knows nothing of this project."""
    run = original(name)
    steps = run.by_megatron(until=UNTIL)
    assert steps[0] == run.rest


def test_the_state_is_not_shifted(original: Callable[[str], Original], tmp_path: Path) -> None:
    """Where buffers have padding between their buckets, every element is at its place: the state that Megatron Core
    saves in its other form is equal, and the one that it saves in this form is not, and is refused."""
    run = original("distributed")
    forms: dict[Form, Path] = {form: tmp_path / form for form in ("dp_reshardable", "fully_reshardable")}
    run.by_megatron(until=SAVED_AT, saves=forms, save_at=SAVED_AT)
    result = verify(run.checkpoint, forms["dp_reshardable"])
    assert result.equal
    assert result.num_weights > 3 * len(inspect(run.checkpoint).weights)  # moments and master copies are among them
    with pytest.raises(ConvertError, match="does not round to the weight"):
        reshard(forms["fully_reshardable"], tmp_path / "out")


def test_what_megatron_lm_reads_of_it(original: Callable[[str], Original]) -> None:
    common = torch.load(original("distributed").checkpoint / "common.pt", weights_only=False)
    assert common["iteration"] == common["args"].iteration == SAVED_AT
    assert common["args"].consumed_train_samples == SAVED_AT * 8
    assert common["checkpoint_version"] == 3.0
    assert common["content_metadata"]["distrib_optim_sharding_type"] == "fully_reshardable"
    assert common["opt_param_scheduler"]["num_steps"] == SAVED_AT * 8
    assert {group["step"] for group in common["optimizer"]["optimizer"]["param_groups"]} == {SAVED_AT}
    assert Config.model_validate_json(common["train_entry"]["config"]).run_dir == original("distributed").path


def test_resharded_and_exported_it_is_the_same_model(original: Callable[[str], Original], tmp_path: Path) -> None:
    run = original("distributed")
    convert(run.checkpoint, tmp_path / "hf", to="hf")
    assert verify(run.checkpoint, tmp_path / "hf").equal
    reshard(run.path / "checkpoints", tmp_path / "resharded", tp=1, pp=2)
    assert verify(run.checkpoint, tmp_path / "resharded").equal
    result = run.goes_on(tmp_path / "run", load=tmp_path / "resharded", layout=Layout(pp=2))
    assert furthest(result.steps, run.rest) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "form"),
    matrix([("plain", "torch"), ("distributed", "distrib_optim")], thin=lambda name, form: name == "distributed"),
)
def test_a_run_of_megatron_lm_goes_on(
    name: str, form: Form, original: Callable[[str], Original], tmp_path: Path
) -> None:
    """Saved in its own old format, by its own code, at its own layout."""
    run = original(name)
    run.by_megatron(until=SAVED_AT, saves={form: tmp_path / "theirs"}, save_at=SAVED_AT)
    result = run.goes_on(tmp_path / "run", load=tmp_path / "theirs", layout=Layout(pp=2))
    assert result.restored.iteration == SAVED_AT
    assert furthest(result.steps, run.rest) < TOLERANCE
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == []


def test_a_weight_that_is_saved_turned_is_refused() -> None:
    """Its optimizer state lies in memory in another order than its file would have it."""
    weight = torch.nn.Parameter(torch.ones(2, 3))
    optimizer = torch.optim.Adam([weight])
    entry = SimpleNamespace(data=weight.detach().t(), key="output_layer.weight")
    with pytest.raises(ConvertError, match=r"`output_layer\.weight` is saved in another order"):
        tensors_of(SimpleNamespace(optimizer=optimizer), {weight: entry}, own_master_key)
