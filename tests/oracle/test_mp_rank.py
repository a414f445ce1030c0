"""The format `torch`: what is written for a layout is, file by file, what Megatron Core holds on its ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fixtures.mp_rank import Optimizer, save_mp_rank
from fixtures.optimizer import random_state
from mcore_convert.checkpoints.weights import find_weights
from mcore_convert.conversion.execute import execute
from mcore_convert.conversion.plan import Plan, moves_between
from mcore_convert.conversion.target_arguments import layout_arguments
from mcore_convert.formats.files import torch_archive as torch_file
from mcore_convert.formats.megatron.options import MegatronOptions
from mcore_convert.formats.mp_rank import writer as mp_rank_writer
from mcore_convert.formats.mp_rank.directory import MpRankCheckpoint, open_mp_rank
from mcore_convert.formats.request import Request
from mcore_convert.formats.traits import LayerSpec
from mcore_convert.spec import Dims, Layout, gpt
from mcore_convert.spec.config import arguments
from mcore_convert.storage.views import TensorMeta
from tests.oracle.test_megatron_fixtures import ARGS, EXPERTS, TIED
from tests.ranks import run_ranks
from tests.wide import matrix

GPT2: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 16,
    "ffn_hidden_size": 64,
    "num_attention_heads": 4,
    "num_query_groups": 4,
    "kv_channels": 4,
    "max_position_embeddings": 8,
    "padded_vocab_size": 32,
    "position_embedding_type": "learned_absolute",
    "add_bias_linear": True,
}
QK_NORM = {**ARGS, "qk_layernorm": True, "add_qkv_bias": True}
FOUR_EXPERTS = {**EXPERTS, "num_layers": 4, "num_experts": 4, "moe_router_enable_expert_bias": True}
FOUR_EXPERTS |= {"moe_router_score_function": "sigmoid", "moe_router_pre_softmax": False}
SHARED_EXPERTS = {**FOUR_EXPERTS, "moe_shared_expert_intermediate_size": 24}
MODELS = {
    "llama": ARGS,
    "tied": TIED,
    "gpt2": GPT2,
    "qk_norm": QK_NORM,
    "experts": FOUR_EXPERTS,
    "shared_experts": SHARED_EXPERTS,
}

LAYOUTS = {
    "1": Layout(),
    "tp2": Layout(tp=2),
    "pp2": Layout(pp=2),
    "tp2pp2": Layout(tp=2, pp=2),
    "vpp2": Layout(pp=2, vpp=2),
    "first1": Layout(pp=2, first_stage_layers=1),
    "text": Layout(pp=2, pipeline_layout="Et|t|t|tL"),
    "tp4": Layout(tp=4),
    "ep2": Layout(ep=2),
    "pp2ep2": Layout(pp=2, ep=2),
}
DENSE = ["tp2", "tp2pp2", "vpp2", "first1", "text"]
SPARSE = ["pp2", "ep2", "pp2ep2"]
PAIRS = [
    *(("llama", name) for name in DENSE),
    *(("tied", name) for name in ("tp2", "tp2pp2", "vpp2")),
    *(("gpt2", name) for name in ("tp4", "tp2pp2", "vpp2")),
    ("qk_norm", "tp2pp2"),
    *(("experts", name) for name in SPARSE),
    ("shared_experts", "pp2ep2"),
]


def saved_by_megatron(
    args: Mapping[str, Any], path: Path, layout: Layout, optimizer: Optimizer | None, dtype: torch.dtype
) -> Path:
    """Return a checkpoint of the same model, with the same state, at a layout."""
    held = {**args, **{name: value for name, value in layout_arguments(layout, dims_of(args)).items() if value}}
    state = random_state(args)
    run_ranks(
        layout.tp * layout.pp * layout.ep,
        lambda: save_mp_rank(
            held,
            state.master if optimizer is None else state,
            path,
            optimizer=optimizer,
            tp=layout.tp,
            pp=layout.pp,
            vpp=layout.vpp,
            ep=layout.ep,
            dtype=dtype,
        ),
    )
    return path


def dims_of(args: Mapping[str, Any], *, vocab_size: int | None = None, padded: int | None = None) -> Dims:
    normal = arguments.normalise(args)
    rows = normal["padded_vocab_size"]
    return Dims.of(normal, vocab_size=vocab_size or rows, padded_vocab_size=padded or rows)


def resharded(
    source: MpRankCheckpoint,
    path: Path,
    layout: Layout,
    *,
    implementation: str | None = None,
    experts: str | None = None,
    vocab_size: int | None = None,
    padded: int | None = None,
) -> Path:
    """Return the checkpoint at another layout, its states included."""
    dims = dims_of(source.args, vocab_size=vocab_size)
    family = gpt.family(arguments.normalise(source.args))
    sources = find_weights(family, dims, source, source.states)
    new = replace(dims, padded_vocab_size=padded or dims.padded_vocab_size)
    request = Request(
        path,
        family,
        new,
        sources.dtype_of,
        MegatronOptions(),
        layout=layout,
        iteration=10,
        common={
            "args": {**arguments.plain(source.args), **layout_arguments(layout, new)},
            "checkpoint_version": 3.0,
            "iteration": 10,
        },
        training=source.training,
        layer_spec=LayerSpec(implementation or source.implementation, experts or source.experts),
    )
    target, reservation = mp_rank_writer.reserve(request)
    moves = moves_between(family, new, sources, target)
    execute(Plan(family, new, source, target, reservation, moves, sources))
    return path


def load(path: Path) -> dict[str, Any]:
    """Return every file of a checkpoint, through torch, by its path."""
    return {
        str(file.relative_to(path)): torch.load(file, weights_only=False, map_location="cpu")
        for file in sorted(path.rglob("*.pt"))
    }


def assert_same(actual: Any, wanted: Any, where: str = "", *, without: tuple[str, ...] = ("args",)) -> None:
    """Same keys in the same order, same values, dtypes and bytes."""
    if isinstance(wanted, torch.Tensor):
        assert isinstance(actual, torch.Tensor), where
        assert (actual.dtype, actual.shape) == (wanted.dtype, wanted.shape), where
        assert torch.equal(actual, wanted), where
    elif isinstance(wanted, dict):
        # Megatron-LM orders the entries of a file otherwise, which nothing depends on
        in_order = set if "checkpoint_version" in wanted else list
        assert in_order(actual) == in_order(wanted), where
        for key, value in wanted.items():
            if key not in without:
                assert_same(actual[key], value, f"{where}/{key}", without=without)
    elif isinstance(wanted, list | tuple):
        assert len(actual) == len(wanted), where
        for number, (mine, other) in enumerate(zip(actual, wanted, strict=True)):
            assert_same(mine, other, f"{where}/{number}", without=without)
    else:
        assert actual == wanted, where


@pytest.mark.parametrize(
    ("model", "name", "optimizer"),
    matrix(
        [
            *((model, name, "distributed") for model, name in PAIRS),
            *((model, name, "plain") for model, name in PAIRS if model in ("llama", "experts")),  # as for the others
        ],
        thin=lambda model, name, optimizer: (
            (model, optimizer) == ("llama", "distributed") or name in ("vpp2", "pp2ep2") or model == "qk_norm"
        ),
    ),
)
def test_every_rank_file_is_what_megatron_holds_there(
    model: str, name: str, optimizer: Optimizer, tmp_path: Path
) -> None:
    args, layout = MODELS[model], LAYOUTS[name]
    wanted = load(saved_by_megatron(args, tmp_path / "megatron", layout, optimizer, torch.bfloat16))
    whole = saved_by_megatron(args, tmp_path / "whole", Layout(), optimizer, torch.bfloat16)
    there = resharded(open_mp_rank(whole), tmp_path / "there", layout)
    assert open_mp_rank(there).layout == layout
    actual = load(there)
    assert sorted(actual) == sorted(wanted)
    assert_same(actual, wanted)
    back = load(resharded(open_mp_rank(tmp_path / "megatron"), tmp_path / "back", Layout()))
    assert_same(back, load(whole))


@pytest.mark.parametrize(
    ("dtype", "optimizer"),
    matrix(
        [(torch.float16, None), (torch.float32, None), (torch.float32, "plain"), (torch.float32, "distributed")],
        thin=lambda dtype, optimizer: dtype == torch.float16 or optimizer == "plain",
    ),
    ids=str,
)
def test_other_dtypes_and_weights_alone(dtype: torch.dtype, optimizer: Optimizer | None, tmp_path: Path) -> None:
    """A plain optimizer of a model in fp32 has no master copies."""
    layout = Layout(tp=2, pp=2)
    wanted = load(saved_by_megatron(TIED, tmp_path / "megatron", layout, optimizer, dtype))
    whole = open_mp_rank(saved_by_megatron(TIED, tmp_path / "whole", Layout(), optimizer, dtype))
    assert (
        whole.states
        == {
            None: ("param",),
            "plain": ("param", "exp_avg", "exp_avg_sq"),
            "distributed": ("param", "master", "exp_avg", "exp_avg_sq"),
        }[optimizer]
    )
    assert (whole.training is None) == (optimizer is None)
    assert_same(load(resharded(whole, tmp_path / "there", layout)), wanted)


@pytest.mark.parametrize("size", [300, pytest.param(1000, marks=pytest.mark.wide)])
def test_buffers_in_buckets(size: int, tmp_path: Path) -> None:
    """With `--overlap-grad-reduce` buffers are cut, on the first stage alone, and padding goes at other places."""
    args = {**TIED, "overlap_grad_reduce": True, "ddp_bucket_size": size}
    layout = Layout(pp=2, vpp=2)
    wanted = load(saved_by_megatron(args, tmp_path / "megatron", layout, "distributed", torch.bfloat16))
    whole = open_mp_rank(saved_by_megatron(args, tmp_path / "whole", Layout(), "distributed", torch.bfloat16))
    assert_same(load(resharded(whole, tmp_path / "there", layout)), wanted)


def test_a_loss_scale_goes_along(tmp_path: Path) -> None:
    source = saved_by_megatron(ARGS, tmp_path / "source", Layout(), "plain", torch.bfloat16)
    file = source / "iter_0000010/mp_rank_00/model_optim_rng.pt"
    content = torch.load(file, weights_only=False)
    scaler = {"scale": torch.tensor([65536.0]), "growth_tracker": 3, "hysteresis_tracker": 2}
    content["optimizer"]["grad_scaler"] = scaler
    torch.save(content, file)
    checkpoint = load(resharded(open_mp_rank(source), tmp_path / "there", Layout(tp=2)))
    for each in checkpoint.values():
        assert_same(each["optimizer"]["grad_scaler"], scaler)


def test_the_vocabulary_is_padded_for_the_new_layout(tmp_path: Path) -> None:
    """Rows of the vocabulary move, in every state; rows of padding are zero."""
    source = open_mp_rank(saved_by_megatron(ARGS, tmp_path / "source", Layout(tp=2), "distributed", torch.bfloat16))
    there = resharded(source, tmp_path / "there", Layout(pp=2), vocab_size=30, padded=48)
    state = random_state(ARGS)
    (first, last) = (
        torch.load(there / f"iter_0000010/mp_rank_00_{pp:03d}/model_optim_rng.pt", weights_only=False)["model"]
        for pp in range(2)
    )
    for rows, name in ((first, "embedding.word_embeddings.weight"), (last, "output_layer.weight")):
        assert rows[name].shape == (48, 16)
        assert torch.equal(rows[name][:30], state.master[name][:30].bfloat16())
        assert not rows[name][30:].any()
    buffer = torch.load(there / "iter_0000010/mp_rank_00_001/distrib_optim.pt", weights_only=False)[0]
    (moments,) = (tensors["exp_avg"] for tensors in buffer.values())  # the output layer is the first in its buffer
    assert torch.equal(moments[: 30 * 16].view(30, 16), state.exp_avg["output_layer.weight"][:30])
    assert not moments[30 * 16 : 48 * 16].any()


def test_a_file_is_as_large_as_it_needs_to_be(tmp_path: Path) -> None:
    """Beyond 4 GiB, and beyond 65,535 records: what torch and our reader find is where the layout said."""
    gigantic = [TensorMeta((2**32 + 100,), "uint8"), TensorMeta((7,), "uint8")]
    behind = [*[TensorMeta((2**31,), "uint8")] * 2, *[TensorMeta((5,), "uint8")] * 3]
    many = [TensorMeta((3,), "uint8")] * 66_000
    for metas in (gigantic, behind, many):
        archive = torch_file.lay_out(list, metas)
        file = tmp_path / "large.pt"
        with file.open("wb") as target:
            os.truncate(target.fileno(), archive.size)
            for at, content in archive.literals:
                os.pwrite(target.fileno(), content, at)
            for number, at in enumerate(archive.holes):
                os.pwrite(target.fileno(), bytes([number % 251]), at)
        assert [view.offset for view in torch_file.TorchFile(file).tree] == list(archive.holes)
        assert file.stat().st_blocks * 512 < 2**25  # a sparse file: nothing was written in the holes
        if metas is many:  # whose pickle torch reads for seconds
            reader: Any = torch._C.PyTorchFileReader(str(file))
            assert [reader.get_record_offset(f"data/{at}") for at in range(len(metas))] == list(archive.holes)
        else:
            actual = torch.load(file, mmap=True, weights_only=True)
            assert [tuple(tensor.shape) for tensor in actual] == [meta.shape for meta in metas]
            assert [int(tensor[0]) for tensor in actual] == [number % 251 for number in range(len(metas))]
