"""Families with experts: files of every form, real checkpoints of Megatron-LM, and what is wrong with one expert."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from fixtures.families import EXPERTS
from fixtures.megatron import random_weights
from fixtures.mp_rank import save_mp_rank
from mcore_convert import ConvertError, convert, inspect, verify
from mcore_convert.checkpoints.identify import identify
from mcore_convert.cli.inspect import grid
from mcore_convert.comparison.logits import tensors_of
from mcore_convert.errors import MappingError
from mcore_convert.formats.base import Findings
from mcore_convert.formats.hf.checkpoint import HfCheckpoint
from mcore_convert.inspection.ranks import rank_parts
from mcore_convert.spec import Dims, Index, Layout, Spelling, Transposed, row
from mcore_convert.spec.family import Item
from mcore_convert.storage.views import TensorMeta, View
from tests.conftest import HfMaker, real_checkpoint
from tests.oracle.test_megatron_load import TOLERANCE, transformers_logits
from tests.oracle.test_mixed_layers import MIXED
from tests.ranks import run_ranks
from tests.tensors import assert_same_tensors, hf_tensors

REAL = ["qwen3moe_legacy", "moe_legacy_pp2ep2", "transformer_engine_names/v0.16.1_moe_te_torch_dist"]
LOGITS_TOLERANCE = 5e-6
# In one of these shapes a transposed matrix has the shape of the plain one.
SQUARE = {"square gate and up": {"hidden_size": 64}, "square down": {"hidden_size": 32}}


@pytest.mark.parametrize("shape", SQUARE)
@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe-dense-layers"])
def test_experts_that_transformers_joins_in_one_tensor(
    name: str, shape: str, hf_checkpoint: HfMaker, tmp_path: Path
) -> None:
    """transformers wrote both: a tensor for each expert, and one for all experts of a layer."""
    from transformers import AutoModelForCausalLM

    size = "intermediate_size" if name == "mixtral" else "moe_intermediate_size"
    source = hf_checkpoint(name, config={**SQUARE[shape], size: 32, "head_dim": 8})
    model = AutoModelForCausalLM.from_pretrained(source)
    model.save_pretrained(tmp_path / "joined", save_original_format=False)
    assert any(key.endswith("experts.gate_up_proj") for key in hf_tensors(tmp_path / "joined"))
    assert verify(source, tmp_path / "joined").equal
    convert(tmp_path / "joined", tmp_path / "megatron", tp=2, ep=2)
    convert(tmp_path / "megatron", tmp_path / "back")
    assert_same_tensors(hf_tensors(tmp_path / "back"), hf_tensors(source))


def test_joined_experts_that_are_transposed_on_a_square_shape(tmp_path: Path) -> None:
    """As in files of gpt-oss or Llama 4: `[experts, in, out]`, against numpy."""
    values = np.arange(3 * 4 * 4, dtype=np.float32).reshape(3, 4, 4)
    file = tmp_path / "values"
    file.write_bytes(values.tobytes())
    spelling = Spelling(("experts.down_proj",), Transposed())
    weight = row("experts.{expert}.linear_fc2.weight", "hidden moe_ffn", "experts.{expert}.w", also=(spelling,))
    dims = Dims(1, 4, 4, 1, 1, 4, 8, 8, 8, False, False, False, num_experts=3, moe_ffn_hidden_size=4)
    checkpoint = HfCheckpoint(tmp_path, {"experts.down_proj": View.of(file, 0, TensorMeta((3, 4, 4), "float32"))}, {})
    for expert in range(3):
        findings = Findings()
        (slot,) = checkpoint.locate(Item(weight, Index(None, expert)), dims, findings)
        assert not findings.missing
        assert not findings.misshapen
        at = np.ndarray((4, 4), np.float32, values.tobytes(), slot.view.offset, slot.view.strides)
        assert (at == values[expert].T).all()


@pytest.mark.parametrize("name", REAL)
def test_real_checkpoints_there_and_back(name: str, tmp_path: Path) -> None:
    source = real_checkpoint(name)
    convert(source, tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "back", tp=2, ep=2, to="torch")
    assert verify(source, tmp_path / "hf").equal
    assert verify(source, tmp_path / "back").equal
    if (source / "logits.pt").is_file():
        recorded: dict[str, Any] = torch.load(source / "logits.pt", weights_only=True)
        result = transformers_logits_of(tmp_path / "hf", recorded["tokens"])
        assert (result - recorded["logits"][..., : result.shape[-1]]).abs().max() < LOGITS_TOLERANCE
        assert result.abs().max() > 1


def transformers_logits_of(path: Path, tokens: torch.Tensor) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        logits: torch.Tensor = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()(tokens).logits
    return logits


def test_expert_ranks_compute_it_together(hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    """Megatron Core at EP 2, with dense layers among those with experts."""
    source = hf_checkpoint("qwen3_moe-dense-layers", fill="normal")
    convert(source, tmp_path / "out", ep=2)
    model = identify(tmp_path / "out")
    tokens = torch.randint(0, model.dims.vocab_size, (2, 16), generator=torch.Generator().manual_seed(0))
    wanted = transformers_logits(source, tokens)
    args = {**model.args, "padded_vocab_size": model.dims.padded_vocab_size}

    def logits() -> torch.Tensor:
        from mcore_convert.megatron.checkpoint import load_torch_dist
        from mcore_convert.megatron.logits import logits
        from mcore_convert.megatron.model import build_stages
        from mcore_convert.megatron.parallel import model_parallel

        with model_parallel(1, 1, ep=2):
            stages = build_stages(args)
            load_torch_dist(stages, tmp_path / "out/release")
            return logits(stages, tokens)

    for actual in run_ranks(2, logits):
        assert (actual[..., : model.dims.vocab_size] - wanted).abs().max() < TOLERANCE
    assert wanted.abs().max() > 0.1


@pytest.mark.parametrize("frequency", [1, [0, 1, 1, 0]], ids=str)
def test_experts_that_megatron_joins_in_one_tensor(frequency: Any, tmp_path: Path) -> None:
    """`GroupedMLP`: `weight1.view(experts, hidden, -1)` holds each matrix transposed."""
    args = {**MIXED, "moe_layer_freq": frequency, "vocab_size": 128}
    weights = random_weights(args)
    run_ranks(2, lambda: save_mp_rank(args, weights, tmp_path / "apart", ep=2))
    shutil.copytree(tmp_path / "apart", tmp_path / "joined")
    for file in (tmp_path / "joined").rglob("model_optim_rng.pt"):
        content = torch.load(file, weights_only=False)
        content["model"] = grouped(content["model"])
        torch.save(content, file)
    a, b = (dict(tensors_of(identify(tmp_path / name))) for name in ("apart", "joined"))
    assert_same_tensors(b, a)


def grouped(model: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    joined: dict[str, torch.Tensor] = {}
    experts: dict[str, list[torch.Tensor]] = {}
    for key, tensor in model.items():
        head, separator, tail = key.partition("local_experts.")
        if not separator:
            joined[key] = tensor
        elif tail.endswith("weight"):
            experts.setdefault(f"{head}weight{1 if 'linear_fc1' in tail else 2}", []).append(tensor.T.contiguous())
    for key, parts in experts.items():
        whole = torch.stack(parts)
        count, first, second = whole.shape
        shape = (first, count * second) if key.endswith("1") else (count * first, second)
        joined[key] = whole.reshape(-1).view(shape)
    return joined


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state, key: state.pop(key), "missing"),
        (lambda state, key: state.update({key.replace("experts.3", "experts.8"): state[key].clone()}), "no place"),
        (lambda state, key: state.update({key: state[key][:-1].clone()}), "shape"),
    ],
    ids=["missing", "extra", "misshapen"],
)
def test_one_expert_is_refused_by_name(change: Any, message: str, hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    key = "model.layers.2.mlp.experts.3.up_proj.weight"
    shutil.copytree(hf_checkpoint("qwen3_moe"), tmp_path / "hf")
    state = load_file(tmp_path / "hf/model.safetensors")
    change(state, key)
    save_file(state, tmp_path / "hf/model.safetensors")
    with pytest.raises(MappingError) as caught:
        convert(tmp_path / "hf", tmp_path / "out")
    wanted = key.replace("experts.3", "experts.8") if message == "no place" else key
    assert message in str(caught.value)
    assert len(caught.value.items) == 1
    assert wanted in caught.value.items[0]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"moe_router_score_function": "sigmoid"}, "moe_router_score_function"),
        ({"moe_router_topk_scaling_factor": 2.5}, "moe_router_topk_scaling_factor"),
        ({"moe_router_enable_expert_bias": True}, "moe_router_enable_expert_bias"),
        ({"moe_router_num_groups": 2, "moe_router_group_topk": 1}, "moe_router_num_groups"),
        ({"moe_expert_capacity_factor": 1.0}, "moe_expert_capacity_factor"),
        ({"moe_router_load_balancing_type": ["sinkhorn"]}, "moe_router_load_balancing_type"),
        ({"moe_shared_expert_intermediate_size": 8}, "moe_shared_expert_intermediate_size"),
        ({"moe_latent_size": 8}, "moe_latent_size"),
        ({"moe_input_jitter_eps": 0.1}, "moe_input_jitter_eps"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("fixture", ["qwen3_moe", "mixtral"])
def test_an_argument_of_experts_that_changes_the_function_is_refused(
    change: dict[str, Any], name: str, fixture: str, hf_checkpoint: HfMaker
) -> None:
    model = identify(hf_checkpoint(fixture))
    assert not model.family.config.refusals(model.args)
    refusals = model.family.config.refusals({**model.args, **change})
    assert any(line.startswith(f"`{name}` = ") for line in refusals)
    neutral = {"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"], "moe_aux_loss_coeff": 0.01}
    assert not model.family.config.refusals({**model.args, **neutral})


def test_inspect_shows_experts(hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    convert(hf_checkpoint("qwen3_moe"), tmp_path / "out", to="torch", tp=2, ep=2, etp=1)
    inspection = inspect(tmp_path / "out")
    assert inspection.family == "qwen3_moe"
    assert [(each.rank.tp, each.rank.ep, each.experts) for each in inspection.ranks] == [
        (0, 0, range(4)),
        (1, 1, range(4, 8)),
    ]
    assert sum(part.nbytes for part in inspection.ranks) == inspection.nbytes


CUT = "of every weight that tensor parallelism cuts"
SHARES = {
    Layout(tp=2): f"1/2 {CUT}",
    Layout(tp=4, etp=2): f"1/4 {CUT}, but 1/2 of those of its experts",
    Layout(tp=2, etp=1): f"1/2 {CUT}, but all of those of its experts",
    Layout(tp=2, ep=2, etp=4): f"1/2 {CUT}, but 1/4 of those of its experts",
    Layout(etp=2): "1/2 of every weight of its experts that is cut",
}


@pytest.mark.parametrize("layout", SHARES, ids=str)
def test_inspect_says_which_share_of_experts_a_rank_has(layout: Layout, hf_checkpoint: HfMaker) -> None:
    model = identify(hf_checkpoint("qwen3_moe"))
    parts = rank_parts(model.family, model.dims, layout, "float32")
    _, _, *rows, share = grid(tuple(parts))
    assert share == f"each rank has {SHARES[layout]}, and all of the others"
    named = {re.split("  +", row)[0] for row in rows}
    apart = layout.expert_tp != layout.tp
    assert named == {
        f"tp {rank.tp} ep {rank.ep}" + (f" etp {layout.cut_at(rank, is_expert=True)[1]}" if apart else "")
        for rank in layout.ranks()
    }
    assert len(rows) == len(named) == layout.ranks_per_stage


def test_ranks_of_further_cut_experts_hold_what_megatron_builds(hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    """Experts over four ranks, of which two share the rest: parameters of every rank."""
    convert(hf_checkpoint("qwen3_moe"), tmp_path / "out", to="torch_dist", tp=2, etp=4)
    args = identify(tmp_path / "out").args

    def count() -> int:
        from mcore_convert.megatron.model import build_stages
        from mcore_convert.megatron.parallel import model_parallel

        with model_parallel(2, 1, etp=4):
            return sum(each.numel() for stage in build_stages(args) for each in stage.parameters())

    assert run_ranks(4, count) == [part.num_parameters for part in inspect(tmp_path / "out").ranks]


@pytest.mark.parametrize("name", EXPERTS)
def test_a_configuration_says_the_same_in_either_spelling(name: str, hf_checkpoint: HfMaker) -> None:
    model = identify(hf_checkpoint(name))
    config = json.loads((model.checkpoint.path / "config.json").read_text())
    one, other = sorted(model.family.config.keys_of("num_experts"), key=lambda key: key not in config)
    respelled = {key: value for key, value in config.items() if key != one} | {other: config[one]}
    to_megatron = model.family.config.to_megatron
    assert to_megatron(respelled) == to_megatron(config)
    with pytest.raises(ConvertError, match="differ"):
        to_megatron({**config, other: 64})
