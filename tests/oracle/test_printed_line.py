"""The printed line, literally: Megatron-LM parses it, and builds from it the model that the files fill."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from fixtures import megatron_flags
from fixtures.mp_rank import Optimizer, load_mp_rank, save_mp_rank
from fixtures.optimizer import STEP, Form, Loaded, State, load_with_optimizer, random_state, save_with_optimizer
from mcore_convert import convert, reshard
from mcore_convert.api import Conversion
from mcore_convert.checkpoints.identify import open_checkpoint
from mcore_convert.formats.files import dcp
from mcore_convert.formats.hf.checkpoint import HfCheckpoint
from mcore_convert.spec.config.arguments import padded_vocab_size
from mcore_convert.spec.config.command_line import command_line
from tests.conftest import HfMaker, real_checkpoint
from tests.oracle.test_megatron_fixtures import ARGS, EXPERTS
from tests.ranks import run_ranks

VOCABULARY = {"vocab_size": 31, "tokenizer_type": "NullTokenizer", "make_vocab_size_divisible_by": 16, "bf16": True}
MODELS = {
    "dense": {**ARGS, **VOCABULARY},
    "experts": {
        **EXPERTS,
        **VOCABULARY,
        "num_layers": 4,
        "num_experts": 4,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 12,
        "moe_shared_expert_intermediate_size": 20,
        "moe_router_score_function": "sigmoid",
        "moe_router_topk_scaling_factor": 2.5,
        "moe_aux_loss_coeff": 0.01,
        "moe_grouped_gemm": True,
    },
}
ALL = megatron_flags.VERSIONS
SINCE_15 = ("0.16", "0.19")
TE, ENGINE = "transformer_engine_names/", "transformer_engine"


def stored_arguments(path: Path) -> dict[str, Any]:
    """Return the arguments that a Megatron checkpoint stores."""
    checkpoint = open_checkpoint(path)
    assert not isinstance(checkpoint, HfCheckpoint)
    assert checkpoint.common.args is not None
    return dict(checkpoint.common.args)


def accepted_by(line: str, versions: tuple[str, ...] = ALL) -> dict[str, argparse.Namespace]:
    """Return what the versions of Megatron-LM that load the files make of the line; each of them must accept it."""
    return {version: megatron_flags.parse(line, version) for version in versions}


@pytest.mark.parametrize(
    ("name", "options", "versions", "wanted"),
    [
        ("llama_legacy_tp2pp2", {"pp": 2, "vpp": 2}, ALL, {"use_distributed_optimizer": True, "ckpt_format": "torch"}),
        ("llama_legacy_tp2pp2", {"to": "torch_dist"}, SINCE_15, {"dist_ckpt_optim_fully_reshardable": True}),
        ("llama_legacy_tp2pp2", {"to": "torch_dist", "for_megatron": "0.12.3"}, ALL, {"lr": 0.003, "min_lr": 0.0001}),
        ("llama_legacy_vpp", {"to": "torch_dist"}, ALL, {"use_distributed_optimizer": False}),
        (
            "gpt2_legacy_tp2pp2",
            {"implementation": "transformer_engine"},
            ALL,
            {"transformer_impl": "transformer_engine"},
        ),
        ("m19_llama_tp2pp2", {"pipeline_layout": "Ett|ttL", "pp": 2}, SINCE_15, {"transformer_impl": "local"}),
        (f"{TE}v0.12.0_llama_te_torch_dist", {}, ("0.12",), {"transformer_impl": ENGINE}),
        (f"{TE}v0.16.1_moe_te_torch_dist", {"ep": 2}, SINCE_15, {"moe_grouped_gemm": True, "num_experts": 4}),
        (f"{TE}v0.16.1_moe_te_torch_dist", {"implementation": "local"}, SINCE_15, {"moe_grouped_gemm": False}),
        (
            "moe_legacy_pp2ep2",
            {"ep": 4},
            ALL,
            {"expert_model_parallel_size": 4, "expert_tensor_parallel_size": 1, "moe_router_topk": 2},
        ),
        ("qwen3moe_legacy", {}, ALL, {"moe_ffn_hidden_size": 48, "qk_layernorm": True, "moe_grouped_gemm": False}),
    ],
)
def test_reshards_of_real_runs(
    name: str, options: dict[str, Any], versions: tuple[str, ...], wanted: dict[str, Any]
) -> None:
    source = real_checkpoint(name)
    done = reshard(source, source.parent / "nothing-is-written", dry_run=True, **options)
    assert done.command is not None
    stored = stored_arguments(source)
    for version, args in accepted_by(done.command, versions).items():
        given = {key: value for key, value in vars(args).items() if key in wanted}
        assert given == {key: value for key, value in wanted.items() if key in vars(args)}, version
        assert (args.lr, args.min_lr) == (stored["lr"], stored["min_lr"])
        assert args.use_checkpoint_opt_param_scheduler
        assert args.no_load_rng is (True if any("--no-load-rng" in note for note in done.notes) else None)
        if stored["num_experts"]:
            balancing = args.moe_router_load_balancing_type
            assert balancing in (stored["moe_router_load_balancing_type"], [stored["moe_router_load_balancing_type"]])


@pytest.mark.parametrize("model", ["gpt2", "llama-gqa"])
@pytest.mark.parametrize("options", [{}, {"to": "torch", "implementation": "local", "tp": 2, "pp": 2}], ids=str)
def test_conversions(model: str, options: dict[str, Any], hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    done = convert(hf_checkpoint(model), tmp_path / "out", **options)
    assert done.command is not None
    assert (tmp_path / "out" / "megatron_args.txt").read_text() == f"{done.command}\n"
    for args in accepted_by(done.command).values():
        assert args.transformer_impl == options.get("implementation", "transformer_engine")
        assert args.ckpt_format == options.get("to", "torch_dist")
        assert args.num_experts is None
        assert not args.use_distributed_optimizer


LATENT = """
    multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim mscale_all_dim
    num_experts moe_layer_freq moe_router_topk moe_router_num_groups moe_router_group_topk moe_router_score_function
    moe_router_dtype moe_router_enable_expert_bias moe_router_topk_scaling_factor moe_router_pre_softmax
    moe_shared_expert_intermediate_size moe_ffn_hidden_size expert_model_parallel_size use_distributed_optimizer
"""


def test_latent_attention_and_layers_without_experts() -> None:
    stored = stored_arguments(real_checkpoint("dsv3_legacy_ep2"))
    words = command_line(stored, optimizer=True)
    for version in ALL:
        args = megatron_flags.parser(version).parse_args(words)
        assert {name: getattr(args, name) for name in LATENT.split()} == {name: stored[name] for name in LATENT.split()}


@pytest.mark.parametrize(
    ("layout", "wanted"),
    [
        ({"pp": 2, "vpp": 2, "first_stage_layers": 2}, (None, 2)),
        ({"pp": 2, "vpp": 3}, (1, None)),
        ({"pp": 2, "vpp": 1}, (None, None)),
        ({"pp": 2, "pipeline_layout": "Ett|t|tt|tL"}, (None, None)),
    ],
    ids=str,
)
@pytest.mark.parametrize("form", ["torch", "torch_dist"])
def test_virtual_stages(
    layout: dict[str, Any], wanted: tuple[Any, Any], form: str, hf_checkpoint: HfMaker, tmp_path: Path
) -> None:
    """Megatron-LM refuses layers of a virtual stage beside uneven stages, and any of both beside a pipeline layout."""
    done = convert(hf_checkpoint("llama-gqa", config={"num_hidden_layers": 6}), tmp_path / "out", to=form, **layout)
    assert done.command is not None
    stored = stored_arguments(tmp_path / "out")
    names = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")
    for args in accepted_by(done.command, SINCE_15 if "pipeline_layout" in layout else ALL).values():
        assert tuple(getattr(args, name) for name in names) == wanted
    assert tuple(stored[name] for name in names) == wanted
    assert stored["virtual_pipeline_model_parallel_size"] == (None if layout.get("vpp") == 1 else layout.get("vpp", 2))


Saved = Callable[[str, Optimizer], Path]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A run of a model that one rank of Megatron Core saved, with a distributed or a plain optimizer."""
    made: dict[tuple[str, str], Path] = {}

    def save(model: str, optimizer: Optimizer) -> Path:
        if (model, optimizer) not in made:
            path = made[model, optimizer] = tmp_path_factory.mktemp(model) / "saved"
            args, state = MODELS[model], state_of(model)
            if model == "dense":
                form: Form = "plain" if optimizer == "plain" else "fully_reshardable"
                run_ranks(1, partial(save_with_optimizer, args, state, path, form))
            else:
                run_ranks(1, partial(save_mp_rank, args, state, path, optimizer=optimizer, dtype=torch.bfloat16))
        return made[model, optimizer]

    return save


def state_of(model: str) -> State:
    return random_state(MODELS[model])


def loaded_by_the_line(done: Conversion, model: str) -> list[Loaded]:
    """Return what Megatron Core loads on each rank, where it is built from the flags of the line and nothing else."""
    assert done.command is not None
    args = vars(megatron_flags.parse(done.command, "0.16"))
    tp, pp = args["tensor_model_parallel_size"], args["pipeline_model_parallel_size"]
    assert args["tokenizer_type"] == "NullTokenizer"  # which adds one to the size in 0.16
    rows = padded_vocab_size(args["vocab_size"] + 1, tp, args["make_vocab_size_divisible_by"])
    args["padded_vocab_size"] = rows
    assert args["transformer_impl"] == "local"  # the layer spec that is built here
    assert not args["moe_grouped_gemm"]
    layers = args["num_layers_per_virtual_pipeline_stage"]
    ep = args["expert_model_parallel_size"]
    load = load_mp_rank if args["ckpt_format"] == "torch" else load_with_optimizer
    each = partial(
        load,
        args,
        state_of(model),
        Path(args["load"], "iter_0000010"),
        distributed=args["use_distributed_optimizer"],
        tp=tp,
        pp=pp,
        vpp=args["num_layers"] // pp // layers if layers else None,
        ep=ep,
    )
    result: list[Loaded] = run_ranks(tp * pp * ep, each)
    return result


@pytest.mark.parametrize(
    ("model", "optimizer", "options"),
    [
        ("dense", "distributed", {"tp": 2}),
        ("dense", "plain", {"to": "torch", "pp": 2, "vpp": 2}),
        ("dense", "distributed", {"to": "torch", "tp": 2, "pp": 2}),
        ("experts", "plain", {"pp": 2, "ep": 2}),
        ("experts", "distributed", {"to": "torch_dist", "ep": 2}),
        ("experts", "plain", {"to": "torch_dist"}),
    ],
)
def test_megatron_core_loads_all_of_it(
    model: str, optimizer: Optimizer, options: dict[str, Any], saved: Saved, tmp_path: Path
) -> None:
    """Strictly, with every parameter and every state of it from the files."""
    if model == "dense":
        options = {"implementation": "local", **options}
    done = reshard(saved(model, optimizer), tmp_path / "out", **options)
    for loaded in loaded_by_the_line(done, model):
        assert not loaded.differing
        assert loaded.count > 20
        assert set(loaded.steps) == {STEP}


@pytest.mark.parametrize("version", ["v0.12.0", "v0.16.1"])
def test_names_of_transformer_engine(version: str, tmp_path: Path) -> None:
    """What is written beside `--transformer-impl transformer_engine` has the keys that Megatron-LM saved with it."""
    real = real_checkpoint(f"{TE}{version}_llama_te_torch")
    done = reshard(real_checkpoint(f"{TE}{version}_llama_te_torch_dist"), tmp_path / "out", to="torch", tp=2, pp=2)
    assert done.command is not None
    assert "--transformer-impl transformer_engine" in done.command
    files = sorted(real.rglob("model_optim_rng.pt"))
    assert len(files) == 4
    for file in files:
        mine = tmp_path / "out" / file.relative_to(real)
        keys, wanted = (set(torch.load(path, weights_only=False)["model"]) for path in (mine, file))
        assert keys == wanted | {key for key in keys if key.endswith("core_attention._extra_state")}


def test_names_of_grouped_experts(tmp_path: Path) -> None:
    source = real_checkpoint(f"{TE}v0.16.1_moe_te_torch_dist")
    done = reshard(source, tmp_path / "out", ep=2)
    assert done.command is not None
    assert "--transformer-impl transformer_engine" in done.command
    assert "--moe-grouped-gemm" in done.command
    actual, wanted = (
        {key for key in dcp.read(path / "iter_0000010").tensors if "optimizer" not in key}
        for path in (tmp_path / "out", source)
    )
    assert actual == wanted
    reshard(source, tmp_path / "local", implementation="local")
    names = set(dcp.read(tmp_path / "local/iter_0000010").tensors)
    assert "decoder.layers.mlp.linear_fc1.layer_norm_weight" in names
    assert "decoder.layers.pre_mlp_layernorm.weight" not in names
