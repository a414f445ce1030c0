"""Attention with sinks and experts with biases, as Megatron Core itself saves and loads them, with optimizer state."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from fixtures.fsdp_dtensor import load_fsdp_dtensor, save_fsdp_dtensor
from fixtures.megatron import Dialect, random_weights, save_torch_dist
from fixtures.mp_rank import Optimizer, load_mp_rank, save_mp_rank
from fixtures.optimizer import STEP, Loaded, load_with_optimizer, random_state
from mcore_convert import convert, reshard, verify
from mcore_convert.checkpoints.identify import identify
from mcore_convert.comparison.logits import tensors_of
from mcore_convert.errors import LayoutError
from mcore_convert.spec import Dims, gpt
from mcore_convert.spec.config.arguments import normalise
from mcore_convert.spec.names import spell
from tests.conftest import HfMaker
from tests.oracle.test_latent import ALIKE
from tests.oracle.test_megatron_fixtures import ARGS
from tests.oracle.test_megatron_load import TOKENS, TOLERANCE, transformers_logits
from tests.ranks import run_ranks
from tests.tensors import assert_same_tensors, hf_tensors

SINKS: dict[str, Any] = {
    **ARGS,
    "num_layers": 2,
    "position_embedding_type": "yarn",
    "rotary_base": 150000,
    "rotary_scaling_factor": 4.0,
    "yarn_original_max_position_embeddings": 2,
    "yarn_correction_range_round_to_int": False,
    "add_bias_linear": True,
    "swiglu": False,
    "quick_geglu": True,
    "glu_linear_offset": 1.0,
    "activation_func_clamp_value": 7.0,
    "softmax_type": "learnable",
    "window_size": [3, 0],
    "window_attn_skip_freq": 2,
    "num_experts": 4,
    "moe_ffn_hidden_size": 16,
    "ffn_hidden_size": 16,
    "moe_router_topk": 2,
    "vocab_size": 31,
    "make_vocab_size_divisible_by": 16,
    "bf16": True,
}
SINK = "decoder.layers.{}.self_attention.core_attention.softmax_offset"


@pytest.mark.parametrize("dialect", ["stacked", "per_layer", "singleton"])
def test_what_megatron_saves_is_read(dialect: Dialect, tmp_path: Path) -> None:
    weights = random_weights(SINKS)
    save_torch_dist(SINKS, weights, tmp_path, dialect=dialect)
    model = identify(tmp_path)
    assert model.family.name == "gpt_oss"
    assert weights[SINK.format(1)].shape == (4,)
    assert weights["decoder.layers.0.mlp.router.bias"].any()
    assert weights["decoder.layers.0.mlp.experts.experts.3.linear_fc1.bias"].any()
    whole = {name: tensor for name, tensor in weights.items() if "word_embeddings" in name or "output_layer" in name}
    cut = {**weights, **{name: tensor[: model.dims.vocab_size] for name, tensor in whole.items()}}
    assert_same_tensors(dict(tensors_of(model)), cut)


OTHERS: dict[str, dict[str, Any]] = {
    "experts with biases alone": {
        **SINKS,
        "softmax_type": "vanilla",
        "window_size": None,
        "swiglu": True,
        "quick_geglu": False,
    },
    "sinks without experts": {**ARGS, "softmax_type": "learnable", "swiglu": False, "quick_geglu": True},
    "sinks of latent attention": {**ALIKE, "softmax_type": "learnable"},
}


@pytest.mark.parametrize("name", OTHERS)
def test_the_rows_of_other_models_are_those_of_megatron(name: str) -> None:
    args = normalise({"vocab_size": 32, **OTHERS[name]})
    dims = Dims.of(args, vocab_size=32, padded_vocab_size=32)
    rows = gpt.family(args).instances(dims)
    result = {spell(row.mcore or "", at): dims.shape(row.shape) for row, at in rows}
    assert result == {key: tuple(tensor.shape) for key, tensor in random_weights(OTHERS[name]).items()}


def test_a_router_has_a_bias_since_the_release_that_has_sinks() -> None:
    args = normalise(OTHERS["experts with biases alone"])
    names = [row.mcore for row in gpt.weights({key: value for key, value in args.items() if key != "softmax_type"})]
    assert not any("router.bias" in str(name) for name in names)
    assert any("router.bias" in str(row.mcore) for row in gpt.weights(args))


def test_each_rank_has_the_sinks_of_its_heads_and_whole_biases_of_experts(tmp_path: Path) -> None:
    """A rank's file, against slices of the global tensors."""
    weights = random_weights(SINKS)
    save_torch_dist(SINKS, weights, tmp_path / "saved")
    reshard(tmp_path / "saved", tmp_path / "moved", to="torch", tp=2, ep=2, implementation="local")
    assert identify(tmp_path / "moved").args["expert_tensor_parallel_size"] == 1
    for rank in range(2):
        (path,) = (tmp_path / "moved").glob(f"*/mp_rank_0{rank}_00{rank}/model_optim_rng.pt")
        model = torch.load(path, weights_only=False)["model"]
        assert torch.equal(model[SINK.format(0)], weights[SINK.format(0)][2 * rank : 2 * rank + 2])
        for local, expert in enumerate((2 * rank, 2 * rank + 1)):
            for name in ("linear_fc1.weight", "linear_fc1.bias", "linear_fc2.weight", "linear_fc2.bias"):
                own = model[f"decoder.layers.1.mlp.experts.local_experts.{local}.{name}"]
                assert torch.equal(own, weights[f"decoder.layers.1.mlp.experts.experts.{expert}.{name}"])


Layout = dict[str, Any]


@pytest.mark.parametrize(
    ("start", "options", "optimizer"),
    [
        ({"ep": 2}, {"to": "torch", "tp": 2, "etp": 1}, "distributed"),
        ({"tp": 2, "etp": 1}, {"to": "torch_dist", "pp": 2}, "plain"),
        ({"pp": 2}, {"to": "torch", "ep": 2}, "distributed"),
    ],
    ids=str,
)
def test_optimizer_state_moves_along(start: Layout, options: Layout, optimizer: Optimizer, tmp_path: Path) -> None:
    """Megatron Core saves, and loads what becomes of it: strictly, with every state of every parameter."""
    state = random_state(SINKS)
    run_ranks(
        2, partial(save_mp_rank, SINKS, state, tmp_path / "saved", optimizer=optimizer, dtype=torch.bfloat16, **start)
    )
    reshard(tmp_path / "saved", tmp_path / "moved", implementation="local", for_megatron="0.16", **options)
    assert verify(tmp_path / "saved", tmp_path / "moved").equal
    layout = {name: size for name, size in options.items() if name != "to"}
    load = load_mp_rank if options["to"] == "torch" else load_with_optimizer
    args = {**SINKS, "transformer_impl": "local"}
    each = partial(load, args, state, tmp_path / "moved/iter_0000010", distributed=optimizer == "distributed", **layout)
    loaded: list[Loaded] = run_ranks(2, each)
    for result in loaded:
        assert not result.differing
        assert set(result.steps) == {STEP}
    assert sum(result.count for result in loaded) > 50


def test_megatron_fsdp_leaves_gate_and_up_in_one_tensor(tmp_path: Path) -> None:
    """It splits them with `--swiglu` alone, so that ranks may not cut them."""
    state = random_state(SINKS)
    run_ranks(2, lambda: save_fsdp_dtensor(SINKS, state, tmp_path / "saved", ep=2))
    reshard(tmp_path / "saved", tmp_path / "moved", to="torch_dist", tp=2, implementation="local")
    assert verify(tmp_path / "saved", tmp_path / "moved").equal
    reshard(tmp_path / "moved", tmp_path / "back", to="fsdp_dtensor", ep=2)
    load = partial(load_fsdp_dtensor, {**SINKS, "transformer_impl": "local"}, state, ep=2)
    assert run_ranks(2, load, tmp_path / "back/iter_0000010") == [0, 0]


def test_a_gate_that_is_no_swiglu_is_cut_as_one(tmp_path: Path) -> None:
    """Without experts, of which Megatron-FSDP would leave the gate rank by rank with what it gates."""
    args = {**ARGS, "swiglu": False, "quick_geglu": True, "vocab_size": 31, "make_vocab_size_divisible_by": 16}
    save_torch_dist(args, random_weights(args), tmp_path / "saved")
    reshard(tmp_path / "saved", tmp_path / "ranks", to="torch", tp=2)
    reshard(tmp_path / "ranks", tmp_path / "back", to="torch_dist")
    assert verify(tmp_path / "saved", tmp_path / "back").equal
    with pytest.raises(LayoutError, match="`fsdp_dtensor` has gate and up rank by rank"):
        reshard(tmp_path / "saved", tmp_path / "fsdp", to="fsdp_dtensor", tp=2)


def test_one_layout_after_another_changes_no_bit(hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    source = hf_checkpoint("gpt_oss", config={"num_hidden_layers": 1, "layer_types": ["sliding_attention"]})
    convert(source, tmp_path / "1", tp=1, to="torch")
    for before, tp in ((1, 2), (2, 4)):
        reshard(tmp_path / str(before), tmp_path / str(tp), tp=tp, ep=tp)
    reshard(tmp_path / "4", tmp_path / "again", tp=1)
    assert verify(tmp_path / "1", tmp_path / "again").equal
    convert(tmp_path / "again", tmp_path / "back")
    assert_same_tensors(hf_tensors(tmp_path / "back"), hf_tensors(source))


def test_ranks_compute_what_transformers_does(hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    """Two ranks, each with half of the heads; experts are whole on both."""
    source = hf_checkpoint("gpt_oss", fill="normal")
    convert(source, tmp_path / "out", tp=2)
    model = identify(tmp_path / "out")
    tokens = torch.randint(0, model.dims.vocab_size, TOKENS, generator=torch.Generator().manual_seed(0))
    wanted = transformers_logits(source, tokens)
    for logits in run_ranks(2, computed, tmp_path / "out/release", model.args, tokens):
        assert (logits[..., : model.dims.vocab_size] - wanted).abs().max() < TOLERANCE


def computed(path: Path, args: dict[str, Any], tokens: torch.Tensor) -> Any:
    from mcore_convert.megatron.checkpoint import load_torch_dist
    from mcore_convert.megatron.logits import logits
    from mcore_convert.megatron.model import build_stages
    from mcore_convert.megatron.parallel import model_parallel

    with model_parallel(2, 1, etp=1):
        stages = build_stages(args)
        load_torch_dist(stages, path)
        return logits(stages, tokens)


def test_experts_with_biases_are_not_cut_and_no_older_release_has_them(hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    source = hf_checkpoint("gpt_oss", config={"num_hidden_layers": 1, "layer_types": ["sliding_attention"]})
    with pytest.raises(
        LayoutError, match="experts have biases, which Megatron Core does not split over etp = 2: give etp = 1"
    ):
        convert(source, tmp_path / "out", tp=2, etp=2)
    with pytest.raises(LayoutError, match=r"attention with sinks needs Megatron-LM 0\.15 or later, not 0\.14"):
        convert(source, tmp_path / "out", for_megatron="0.14")
    assert not (tmp_path / "out").exists()
