"""Optimizer state in `torch_dist`: Megatron Core's is read bit for bit, and Megatron Core loads what is written."""

from __future__ import annotations

import dataclasses
import pickle
import re
import shutil
from collections.abc import Callable
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fixtures.megatron import Dialect
from fixtures.optimizer import STEP, Form, State, load_with_optimizer, random_state, save_with_optimizer
from mcore_convert.checkpoints.checks import Check
from mcore_convert.checkpoints.weights import find_weights, items_of
from mcore_convert.conversion.execute import execute
from mcore_convert.conversion.plan import Plan, moves_between
from mcore_convert.errors import ConvertError, MappingError, UnreadableCheckpoint
from mcore_convert.formats.base import Findings
from mcore_convert.formats.megatron.options import DcpOptions
from mcore_convert.formats.request import Request
from mcore_convert.formats.torch_dist import writer as torch_dist_writer
from mcore_convert.formats.torch_dist.checkpoint import TorchDistCheckpoint, open_torch_dist
from mcore_convert.spec import gpt
from mcore_convert.spec.config import arguments
from mcore_convert.spec.dims import Dims
from mcore_convert.spec.family import Family
from mcore_convert.spec.layout import Layout
from mcore_convert.spec.names import EXP_AVG, EXP_AVG_SQ, MASTER, PARAM
from mcore_convert.spec.shard import Box
from mcore_convert.storage.elements import Files, global_tensor
from mcore_convert.storage.values import round_to
from tests.oracle.test_megatron_fixtures import ARGS, EXPERTS, TIED
from tests.ranks import run_ranks
from tests.wide import matrix

ADAM = (PARAM, MASTER, EXP_AVG, EXP_AVG_SQ)
GPT2 = {**ARGS, "add_bias_linear": True, "normalization": "LayerNorm", "swiglu": False, "qk_layernorm": True}
MODELS: dict[str, dict[str, Any]] = {
    "llama": ARGS,
    "tied": TIED,
    "gpt2": {**GPT2, "position_embedding_type": "learned_absolute", "untie_embeddings_and_output_weights": False},
    "experts": {**EXPERTS, "num_layers": 4, "num_experts": 4},
}
FORMS: tuple[Form, ...] = ("plain", "fully_reshardable", "dp_reshardable")
DIALECTS: tuple[Dialect, ...] = ("per_layer", "singleton")

# A checkpoint of Megatron's own: `saved(model, form, **options)` of `save_with_optimizer`.
Saved = Callable[..., Path]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Saved on four ranks; each is made once."""
    made: dict[Any, Path] = {}

    def save(model: str, form: Form, **options: Any) -> Path:
        key = (model, form, *sorted(options.items()))
        if key not in made:
            path = made[key] = tmp_path_factory.mktemp(model) / "saved"
            run_ranks(4, partial(save_with_optimizer, MODELS[model], state_of(model), path, form, **options))
        return made[key]

    return save


@lru_cache
def state_of(model: str) -> State:
    """Return the state that every checkpoint of a model holds."""
    return random_state(MODELS[model])


def model_of(checkpoint: TorchDistCheckpoint) -> tuple[Family, Dims]:
    """Return all rows of the model, its vocabulary with the padding."""
    assert checkpoint.common.args is not None
    args = arguments.normalise(checkpoint.common.args)
    rows = checkpoint.embedding_rows
    assert rows is not None
    return gpt.family(args), Dims.of(args, vocab_size=rows, padded_vocab_size=rows)


def states_in(path: Path) -> dict[tuple[str, str], Tensor]:
    """Return every state of every weight, through the reader; it is proven that they are whole,
    and what needs a proof.
    """
    checkpoint = open_torch_dist(path)
    family, dims = model_of(checkpoint)
    sources = find_weights(family, dims, checkpoint, checkpoint.states)
    result = {}
    with Files() as files:
        for check in sources.checks:
            assert holds(check, files), check.failure
        for item, slots in sources.slots.items():
            tensor = torch.from_numpy(global_tensor(files, slots, family.shape(item.weight, dims)).copy())
            result[str(item._replace(state=PARAM)), item.state] = tensor.view(getattr(torch, slots[0].view.dtype))
    return result


def holds(check: Check, files: Files) -> bool:
    """Return whether two views are equal, the first one rounded where that is what the check asks."""
    assert check.other is not None
    values = files.read(check.view)
    if check.rounded:
        values = round_to(values, check.other.dtype)
    return bool((values == files.read(check.other)).all())


def assert_is(actual: dict[tuple[str, str], Tensor], state: State, dtype: torch.dtype = torch.bfloat16) -> None:
    """Assert that the weights are the rounded master copies, and that the states are these, bit for bit."""
    assert {name for name, _ in actual} == set(state.master)
    for (name, kind), tensor in actual.items():
        wanted = state.master[name].to(dtype) if kind == PARAM else getattr(state, kind)[name]
        assert tensor.dtype == wanted.dtype, (name, kind)
        assert torch.equal(tensor, wanted), (name, kind)


LAYOUTS: dict[str, list[dict[str, int]]] = {
    "llama": [{"tp": 2}, {"pp": 2, "vpp": 2}],
    "tied": [{"tp": 2, "pp": 2}, {"pp": 2, "vpp": 2}],
    "gpt2": [{"tp": 2}, {"pp": 2}],
    "experts": [{"pp": 2, "ep": 2}, {"tp": 2, "pp": 2}],
}
GATHERED = [(model, LAYOUTS[model][0]) for model in ("llama", "tied", "experts")]


@pytest.mark.parametrize(
    ("model", "layout", "form"),
    matrix(
        ((model, layout, form) for model, layouts in LAYOUTS.items() for layout in layouts for form in FORMS),
        # of the others, the form that knows least of its parameters where they have most to tell
        thin=lambda model, layout, form: model == "llama" or "ep" in layout or (form == FORMS[2] and "pp" in layout),
    ),
    ids=str,
)
def test_every_form_holds_the_same_state(model: str, layout: dict[str, int], form: Form, saved: Saved) -> None:
    path = saved(model, form, **layout)
    checkpoint = open_torch_dist(path)
    assert checkpoint.states == ADAM
    assert checkpoint.matched_by_order == (form in ("dp_reshardable", "fully_reshardable"))
    assert_is(states_in(path), state_of(model))
    training = checkpoint.training
    assert training is not None
    assert (training.iteration, training.distributed) == (10, form != "plain")
    assert training.rest == {"num_floating_point_operations_so_far": 1e9}
    assert training.scheduler is not None
    assert training.scheduler["num_steps"] == 56
    experts = [group["is_expert_parallel"] for group in training.groups]
    assert experts == [False, False, *([True] if layout.get("ep") else [])]
    assert all(group["step"] == STEP and "params" not in group for group in training.groups)


@pytest.mark.parametrize(("model", "layout"), matrix(GATHERED, thin=lambda model, _: model != "tied"), ids=str)
def test_state_that_was_gathered_into_objects(model: str, layout: dict[str, int], saved: Saved) -> None:
    path = saved(model, "dp_zero_gather_scatter", **layout)
    assert not [key for key in open_torch_dist(path).optimizer_keys if "bucket_idx" in key]
    assert_is(states_in(path), state_of(model))


def test_buckets_of_any_size(saved: Saved) -> None:
    path = saved("llama", "dp_reshardable", tp=2, bucket_size=600)
    keys = [key for key in open_torch_dist(path).optimizer_keys if key.endswith("bucket_idx_3.param")]
    assert len(keys) == 2
    assert_is(states_in(path), state_of("llama"))


@pytest.mark.parametrize(
    ("dtype", "form"),
    matrix(
        product((torch.float32, torch.float16), FORMS),
        thin=lambda dtype, form: form == ("fully_reshardable" if dtype == torch.float16 else "plain"),
    ),
    ids=str,
)
def test_other_dtypes(dtype: torch.dtype, form: Form, saved: Saved) -> None:
    path = saved("llama", form, tp=2, dtype=dtype)
    checkpoint = open_torch_dist(path)
    has_masters = dtype != torch.float32 or form != "plain"
    assert checkpoint.states == (ADAM if has_masters else (PARAM, EXP_AVG, EXP_AVG_SQ))
    assert_is(states_in(path), state_of("llama"), dtype)
    assert checkpoint.training is not None
    scaler = {"scale": 2.0**32, "growth_tracker": 0, "hysteresis_tracker": 2}
    assert checkpoint.training.rest.get("grad_scaler") == (scaler if dtype == torch.float16 else None)


@pytest.mark.parametrize(
    ("dialect", "form"),
    matrix(product(DIALECTS, FORMS[:2]), thin=lambda dialect, form: (dialect == DIALECTS[0]) == (form == "plain")),
)
def test_dialects(dialect: Dialect, form: Form, saved: Saved) -> None:
    for model in ("llama", "experts"):
        path = saved(model, form, tp=2, dialect=dialect)
        assert open_torch_dist(path).dialect == dialect
        assert_is(states_in(path), state_of(model))


def reshard(path: Path, destination: Path, *, tp: int = 1, ep: int = 1) -> None:
    """Write what a checkpoint holds once more, for a run with these sizes."""
    source = open_torch_dist(path)
    family, dims = model_of(source)
    sources = find_weights(family, dims, source, source.states)
    assert source.common.args is not None
    args = {**arguments.plain(source.common.args), "expert_model_parallel_size": ep}
    request = Request(
        destination,
        family,
        dims,
        sources.dtype_of,
        DcpOptions(),
        layout=Layout(tp=tp),
        iteration=10,
        common={"args": args, "checkpoint_version": 3.0, "iteration": 10},
        run_config="",
        training=source.training,
    )
    target, reservation = torch_dist_writer.reserve(request)
    moves = moves_between(family, dims, sources, target)
    execute(Plan(family, dims, source, target, reservation, moves, sources))


GOES_ON: list[tuple[str, Form, dict[str, int], list[dict[str, int]]]] = [
    ("llama", "dp_reshardable", {"tp": 2}, [{}, {"tp": 2, "pp": 2}, {"pp": 2, "vpp": 2}]),
    ("llama", "plain", {"tp": 2}, [{}, {"tp": 2, "pp": 2}, {"pp": 2, "vpp": 2}]),
    ("tied", "dp_reshardable", {"pp": 2, "vpp": 2}, [{"tp": 2}, {"tp": 2, "pp": 2}]),
    ("tied", "plain", {"pp": 2, "vpp": 2}, [{"tp": 2}, {"tp": 2, "pp": 2}]),
    ("experts", "dp_reshardable", {"pp": 2, "ep": 2}, [{"tp": 2}, {"ep": 2}, {"pp": 2, "ep": 2}]),
    ("experts", "plain", {"tp": 2, "pp": 2}, [{"tp": 2}, {"ep": 2}, {"pp": 2, "ep": 2}]),
]


@pytest.mark.parametrize(
    ("dtype", "model", "form", "layout", "onto"),
    matrix(
        [
            *((torch.bfloat16, *case) for case in GOES_ON),
            *((torch.float32, *case) for case in GOES_ON if case[0] == "llama"),
        ],
        thin=lambda dtype, _, form, *__: form == ("dp_reshardable" if dtype == torch.bfloat16 else "plain"),
    ),
    ids=str,
)
def test_megatron_goes_on_at_any_layout(
    model: str,
    form: Form,
    layout: dict[str, int],
    onto: list[dict[str, int]],
    dtype: torch.dtype,
    saved: Saved,
    tmp_path: Path,
) -> None:
    """Loaded by Megatron's own optimizers with default strictness, on two or four ranks, some of them data-parallel."""
    source = saved(model, form, dtype=dtype, **layout)
    for number, target in enumerate(onto):
        path = tmp_path / str(number)
        reshard(source, path, tp=target.get("tp", 1), ep=target.get("ep", 1))
        assert_is(states_in(path), state_of(model), dtype)
        options: dict[str, Any] = {"distributed": form != "plain", "dtype": dtype, **target}
        load = partial(load_with_optimizer, MODELS[model], state_of(model), path / "iter_0000010", **options)
        for loaded in run_ranks(4 if target else 1, load):
            assert not loaded.differing, target
            assert loaded.count > 20
            assert set(loaded.steps) == {STEP}
            assert [group["wd_mult"] for group in loaded.groups] == [1.0, 0.0, *([1.0] if target.get("ep") else [])]
            assert all(group["weight_decay"] == 0.1 for group in loaded.groups)


def test_the_loss_scale_goes_along(saved: Saved, tmp_path: Path) -> None:
    reshard(saved("llama", "fully_reshardable", tp=2, dtype=torch.float16), tmp_path / "again")
    common = torch.load(tmp_path / "again/iter_0000010/common.pt", weights_only=False)
    scale = common["optimizer"]["grad_scaler"].pop("scale")
    assert torch.equal(scale, torch.tensor([2.0**32]))
    assert common["optimizer"]["grad_scaler"] == {"growth_tracker": 0, "hysteresis_tracker": 2}
    assert (
        open_torch_dist(tmp_path / "again").training
        == open_torch_dist(saved("llama", "fully_reshardable", tp=2, dtype=torch.float16)).training
    )


def test_the_common_state_is_that_of_megatron(saved: Saved, tmp_path: Path) -> None:
    for number, form in enumerate(("plain", "fully_reshardable")):
        source = saved("experts", form, pp=2, ep=2)
        reshard(source, tmp_path / str(number), ep=2)
        wanted, actual = (
            torch.load(path / "iter_0000010/common.pt", weights_only=False) for path in (source, tmp_path / str(number))
        )
        assert {**actual, "args": None, "content_metadata": None} == {**wanted, "args": None, "content_metadata": None}
        wanted = {**wanted["content_metadata"], "distrib_optim_fully_reshardable_mem_efficient": False}
        assert actual["content_metadata"].items() <= wanted.items()


def copy_with(
    path: Path, destination: Path, rename: Callable[[str], str], common: dict[str, Any] | None = None
) -> Path:
    """Return a copy of an `iter_*` directory with other keys in its metadata and more in its common state."""
    shutil.copytree(path / "iter_0000010", destination)
    metadata = pickle.loads((destination / ".metadata").read_bytes())
    metadata.state_dict_metadata = {rename(key): entry for key, entry in metadata.state_dict_metadata.items()}
    metadata.storage_data = {
        dataclasses.replace(index, fqn=rename(index.fqn)): info for index, info in metadata.storage_data.items()
    }
    (destination / ".metadata").write_bytes(pickle.dumps(metadata))
    stored = torch.load(destination / "common.pt", weights_only=False)
    torch.save({**stored, **(common or {})}, destination / "common.pt")
    return destination


@pytest.mark.parametrize("form", ["plain", "fully_reshardable", "dp_reshardable"])
@pytest.mark.parametrize("prefix", ["module.", "chained_0."])
def test_prefixes(prefix: str, form: Form, saved: Saved, tmp_path: Path) -> None:
    """Of a wrapper around the model, as NeMo's; and of chained optimizers, which had one in any form until 0.13."""

    def prefixed(key: str) -> str:
        if prefix == "chained_0.":
            return f"{prefix}{key}" if key.startswith("optimizer.") else key
        if "dp_group_idx" in key or key.startswith("rng_state"):
            return key
        return re.sub(r"^(optimizer\.state\.\w+\.)?", rf"\1{prefix}", key)

    path = copy_with(saved("llama", form, tp=2), tmp_path / "it", prefixed)
    assert_is(states_in(path), state_of("llama"))
    assert open_torch_dist(path).training == open_torch_dist(saved("llama", form, tp=2)).training


@pytest.mark.parametrize(
    ("form", "rename", "common", "kind", "message"),
    [
        ("plain", ("exp_avg_sq", "max_exp_avg_sq"), {}, MappingError, "no place in the state of a weight"),
        ("plain", ("exp_avg.output_layer", "exp_avg.stranger"), {}, MappingError, "belong to no weight of its model"),
        ("plain", ("", ""), {"optimizer": {"state": {}, "param_groups": [{}]}}, UnreadableCheckpoint, "how many steps"),
        ("dp_reshardable", ("bucket_idx_0.exp_avg", "bucket_idx_0.moment"), {}, MappingError, "no place"),
        ("dp_reshardable", ("dp_group_idx_1", "dp_group_idx_5"), {}, UnreadableCheckpoint, "of any known layer spec"),
        (
            "dp_reshardable",
            ("", ""),
            {"content_metadata": {"distrib_optim_sharding_type": "fully_sharded_bucket_space"}},
            UnreadableCheckpoint,
            "`fully_sharded_bucket_space`, which is not read",
        ),
        (
            "fully_reshardable",
            ("", ""),
            {"content_metadata": {"distrib_optim_sharding_type": "fully_sharded_model_space"}},
            UnreadableCheckpoint,
            "the shapes from before are not stored",
        ),
    ],
    ids=str,
)
def test_nothing_is_left_out_in_silence(
    form: Form,
    rename: tuple[str, str],
    common: dict[str, Any],
    kind: type[ConvertError],
    message: str,
    saved: Saved,
    tmp_path: Path,
) -> None:
    path = copy_with(saved("llama", form, tp=2), tmp_path / "it", lambda key: key.replace(*rename), common)
    with pytest.raises(kind, match=message):
        reshard(path, tmp_path / "again")
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("name", ["dp_group_idx_0", "exp_avg"])
def test_buckets_in_another_order_are_refused(name: str, saved: Saved, tmp_path: Path) -> None:
    """Master copies that do not round to the weights: those of another rank, or moments in their place."""

    def exchanged(key: str) -> str:
        if name == "exp_avg":
            swapped = {"exp_avg": "param", "param": "exp_avg"}
            head, _, tail = key.rpartition(".")
            return f"{head}.{swapped.get(tail, tail)}" if "bucket_idx" in key else key
        return re.sub(r"dp_group_idx_([01])", lambda result: f"dp_group_idx_{1 - int(result[1])}", key)

    path = copy_with(saved("llama", "dp_reshardable", tp=2), tmp_path / "it", exchanged)
    with pytest.raises(UnreadableCheckpoint, match="order of any known layer spec") as caught:
        states_in(path)
    assert len(caught.value.items) == 2
    assert all("does not round" in item for item in caught.value.items)


def test_a_wrong_state_is_found_by_the_proof_where_the_sample_is_too_small(saved: Saved, tmp_path: Path) -> None:
    """The order is found with the first elements of each parameter; the proof looks at all of them."""
    shutil.copytree(saved("llama", "dp_reshardable", tp=2), tmp_path / "it")
    checkpoint = open_torch_dist(tmp_path / "it")
    family, dims = model_of(checkpoint)
    item = next(i for i in items_of(family, dims, ADAM) if i.state == MASTER and "linear_fc2" in str(i))
    slot = checkpoint.locate(item, dims, Findings())[-1]
    last = slot.view.narrow(Box(tuple(size - 1 for size in slot.view.shape), (1,) * len(slot.view.shape)))
    with slot.view.path.open("r+b") as file:
        file.seek(last.offset)
        file.write(b"\0\0\x80\x3f")
    with pytest.raises(ConvertError, match="does not round"):
        reshard(tmp_path / "it", tmp_path / "again")
