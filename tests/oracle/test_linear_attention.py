"""Layers of two kinds, plain attention with a gate and the gated delta rule, and those of hybrids, as Megatron Core
itself saves and loads them: in every dialect, at every tensor parallelism, with optimizer state."""

from __future__ import annotations

import importlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fixtures.megatron import Dialect, random_weights, save_torch_dist
from fixtures.mp_rank import load_mp_rank, save_mp_rank
from fixtures.optimizer import STEP, random_state, save_with_optimizer
from mcore_convert import convert, export, reshard, verify
from mcore_convert.checkpoints.identify import identify
from mcore_convert.comparison.logits import tensors_of
from mcore_convert.errors import ConfigError, ConvertError, LayoutError, MappingError
from mcore_convert.formats.torch_dist.keys import keyed_parts
from mcore_convert.spec import Dims, Layout, gpt
from mcore_convert.spec.config.arguments import normalise
from mcore_convert.spec.config.bridge import MIXED_LAYERS
from tests.conftest import HfMaker
from tests.oracle.test_megatron_fixtures import ARGS
from tests.ranks import run_ranks
from tests.tensors import assert_same_tensors
from train_entry.config.layouts import problems_of_model
from train_entry.config.schema import Config

MIXED: dict[str, Any] = {
    **ARGS,
    "num_layers": 2,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "attention_output_gate": True,
    "qk_layernorm": True,
    "layernorm_zero_centered_gamma": True,
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": 2,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 3,
    "linear_value_head_dim": 5,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "num_experts": 4,
    "moe_layer_freq": [0, 1],
    "moe_ffn_hidden_size": 8,
    "moe_shared_expert_intermediate_size": 8,
    "moe_shared_expert_gate": True,
    "moe_router_topk": 2,
    "mtp_num_layers": 1,
    "vocab_size": 31,
    "make_vocab_size_divisible_by": 16,
    "bf16": True,
}
HYBRID: dict[str, Any] = {
    **{name: value for name, value in ARGS.items() if name != "swiglu"},
    "num_layers": 6,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "position_embedding_type": "none",
    "squared_relu": True,
    "is_hybrid_model": True,
    "hybrid_override_pattern": "M*ME-M",
    "mamba_state_dim": 3,
    "mamba_head_dim": 5,
    "mamba_num_groups": 4,
    "mamba_num_heads": 8,
    "num_experts": 4,
    "moe_ffn_hidden_size": 8,
    "moe_shared_expert_intermediate_size": 8,
    "moe_router_topk": 2,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "vocab_size": 31,
    "make_vocab_size_divisible_by": 16,
    "bf16": True,
}
MODELS = pytest.mark.parametrize("args", [MIXED, HYBRID], ids=["gated_delta_net", "hybrid"])


def joined(weights: dict[str, Tensor], args: dict[str, Any]) -> dict[str, Tensor]:
    """Return the weights with the segments that Megatron Core names as one tensor each."""
    segments = {(row.mcore or "").rpartition("}.")[2]: row.shard.names for row in gpt.weights(args) if row.shard.names}
    whole = {name: tensor for name, tensor in weights.items() if not name.rpartition(".")[0].endswith(tuple(segments))}
    for suffix, names in segments.items():
        for stem in {name.rpartition(".")[0] for name in weights if name.endswith(f"{suffix}.{names[0]}")}:
            whole[stem] = torch.cat([weights[f"{stem}.{name}"] for name in names])
    return whole


@MODELS
@pytest.mark.parametrize("dialect", ["per_layer", "singleton"])
def test_what_megatron_saves_is_read(dialect: Dialect, args: dict[str, Any], tmp_path: Path) -> None:
    weights = random_weights(args)
    # of layers that predict one has plain attention, too
    assert sum("linear_qkv.weight" in name for name in weights) == (1 if args is HYBRID else 2)
    names = gpt.MIXER_IN_PROJ if args is HYBRID else gpt.IN_PROJ
    assert {name.rpartition(".")[2] for name in weights if "layers.0." in name and "in_proj.weight." in name} == {
        *names
    }
    save_torch_dist(args, weights, tmp_path, dialect=dialect, moe_norm="transformer_engine")
    model = identify(tmp_path)
    assert getattr(model.checkpoint, "dialect", None) == dialect
    rows = model.dims.vocab_size
    cut = {name: each[:rows] if each.shape[0] == 32 and "embed" in name else each for name, each in weights.items()}
    cut["output_layer.weight"] = weights["output_layer.weight"][:rows]
    assert_same_tensors(dict(tensors_of(model)), joined(cut, args))


LOCAL: dict[str, Any] = {"implementation": "local", "for_megatron": "0.16"}


@MODELS
def test_segments_go_through_every_tensor_parallelism(args: dict[str, Any], tmp_path: Path) -> None:
    """1 -> 2 -> 4 -> 1, in both formats, with optimizer state, which Megatron Core saves and loads itself."""
    state = random_state(args)
    run_ranks(1, partial(save_mp_rank, args, state, tmp_path / "1", optimizer="distributed", dtype=torch.bfloat16))
    reshard(tmp_path / "1", tmp_path / "2", to="torch", tp=2, **LOCAL)
    reshard(tmp_path / "2", tmp_path / "4", to="torch_dist", tp=4, **LOCAL)
    reshard(tmp_path / "4", tmp_path / "back", to="torch", tp=1, **LOCAL)
    local = {**args, "transformer_impl": "local"}
    load = partial(load_mp_rank, local, state, tmp_path / "2/iter_0000010", distributed=True, tp=2)
    for result in run_ranks(2, load):
        assert not result.differing
        assert set(result.steps) == {STEP}
    first, last = (content(tmp_path / name / "iter_0000010/mp_rank_00") for name in ("1", "back"))
    assert_same_tensors(first, last)


def content(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of one rank's model and of its flat buffers."""
    model = torch.load(folder / "model_optim_rng.pt", weights_only=False)["model"]
    buffers = torch.load(folder / "distrib_optim.pt", weights_only=False)
    result = {name: each for name, each in model.items() if isinstance(each, Tensor) and "_extra_state" not in name}
    (of_dtype,) = buffers[0].values()
    return result | {name: each for name, each in of_dtype.items() if isinstance(each, Tensor)}


def test_a_trained_norm_is_exported_from_its_master_copy(tmp_path: Path) -> None:
    """What is learned around zero has more bits than fit beside one in bfloat16."""
    state, run = random_state(MIXED), tmp_path / "run"
    run_ranks(1, partial(save_mp_rank, MIXED, state, run, optimizer="distributed", dtype=torch.bfloat16))
    with pytest.raises(ConvertError, match=r"out_norm.weight` cannot be stored with \+1 added: \d of 5 numbers"):
        export(run, tmp_path / "refused", with_tokenizer=False)
    master = state.master["decoder.layers.0.self_attention.out_norm.weight"].double() + 1
    for dtype, wanted in (("bfloat16", master.float().bfloat16()), ("float32", master.float())):
        export(run, tmp_path / dtype, from_master=True, dtype=dtype, with_tokenizer=False)
        written = load_file(tmp_path / dtype / "model.safetensors")["model.layers.0.linear_attn.norm.weight"]
        assert torch.equal(written, wanted)


@MODELS
def test_flat_buckets_are_resharded(args: dict[str, Any], tmp_path: Path) -> None:
    """Their order is that of the modules, which master copies prove."""
    state = random_state(args)
    saved = partial(save_with_optimizer, args, state, tmp_path / "saved", "dp_reshardable", dialect="per_layer", tp=2)
    run_ranks(2, saved)
    reshard(tmp_path / "saved", tmp_path / "moved", to="torch", pp=2, **LOCAL)
    assert verify(tmp_path / "saved", tmp_path / "moved").equal


@MODELS
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_segments_are_cut_as_megatron_core_does(tp: int, args: dict[str, Any]) -> None:
    """The keys, the boxes and the global shapes of each rank."""
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.ssm.gated_delta_net import _split_tensor_factory

    dims = Dims.of(normalise(args), vocab_size=31, padded_vocab_size=32)
    rows = {row.name.rpartition("}.")[2]: row for row in gpt.weights(args) if row.shard.names}
    assert [name.partition(".")[2] for name in rows][:2] == ["in_proj.weight", "conv1d.weight"]
    for name, row in rows.items():
        shape, shard = dims.shape(row.shape), dims.sized(row.shard)
        lengths = [dims.size(word) // tp for word in row.shard.parts if isinstance(word, str)]
        for rank in range(tp):
            local = torch.zeros(shape[0] // tp, *shape[1:])
            whole = ShardedTensor.from_rank_offsets(name, local, (0, rank, tp))
            theirs = _split_tensor_factory(whole, lengths, list(row.shard.names), 0).build()
            boxes = shard.boxes(shape, tp, rank)
            for part, box, (key, start, of_key) in zip(theirs, boxes, keyed_parts(name, shape, shard), strict=True):
                assert (part.key, part.global_shape) == (key, of_key)
                inside = box.relative_to((start, *(0 for _ in shape[1:])))
                assert (part.global_offset, part.local_shape) == (inside.offsets, inside.sizes)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"linear_attention_freq": [0, 1]}, "gated_delta_net' in the last layer, with `mtp_num_layers` = 1"),
        ({"multi_latent_attention": True}, "gated_delta_net', with `multi_latent_attention` = True"),
        ({"experimental_attention_variant": "dsa"}, "`experimental_attention_variant` = 'dsa'"),
    ],
    ids=str,
)
def test_what_is_built_in_several_ways_is_refused(changed: dict[str, Any], reason: str) -> None:
    assert any(reason in line for line in gpt.refusals({**MIXED, **changed}))


def test_megatron_fsdp_holds_no_segments(hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    with pytest.raises(MappingError, match="`fsdp_dtensor` does not hold linear attention") as error:
        convert(hf_checkpoint("qwen3_5"), tmp_path / "fsdp", to="fsdp_dtensor")
    assert "decoder.layers.{layer}.self_attention.in_proj.weight" in error.value.items
    assert not (tmp_path / "fsdp").exists()


def test_megatron_core_has_the_function_that_makes_mixed_layers() -> None:
    module, _, name = MIXED_LAYERS.rpartition(".")
    assert callable(getattr(importlib.import_module(module), name))


def test_it_is_not_trained_here() -> None:
    lines = list(problems_of_model(Config(), MIXED))
    for name in ("experimental_attention_variant", "attention_output_gate"):
        assert any(line.startswith(f"`{name}` = ") and "not trained here" in line for line in lines)


def test_heads_that_cannot_be_shared_by_ranks_are_refused() -> None:
    dims = Dims.of({**MIXED, "linear_num_key_heads": 2}, vocab_size=31, padded_vocab_size=32)
    with pytest.raises(LayoutError, match="`linear_num_key_heads` = 2 cannot be split over tp = 4"):
        Layout(tp=4).check(dims)
    with pytest.raises(ConfigError, match="= 8 cannot be shared by `linear_num_key_heads` = 3"):
        Dims.of({**MIXED, "linear_num_key_heads": 3}, vocab_size=31, padded_vocab_size=32)
    with pytest.raises(ConfigError, match=r"`linear_attention_freq` = \[1\] does not say which of 2 layers"):
        Dims.of({**MIXED, "linear_attention_freq": [1]}, vocab_size=31, padded_vocab_size=32)
