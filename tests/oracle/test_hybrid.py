"""Hybrids: their layers, stages and names as Megatron Core has them, and their function as transformers computes it."""

from __future__ import annotations

import dataclasses
import json
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mcore_convert import convert, reshard, verify
from mcore_convert.checkpoints.identify import identify
from mcore_convert.conversion.target_arguments import pattern_arguments
from mcore_convert.errors import ConfigError, ConvertError, LayoutError, MappingError
from mcore_convert.formats.megatron.modules import in_module_order
from mcore_convert.megatron.config import config_of
from mcore_convert.megatron.cpu import without_cuda
from mcore_convert.megatron.mixers import import_hybrids, rearrange, scan
from mcore_convert.megatron.parallel import single_process
from mcore_convert.spec import Dims, Layout, gpt, hybrid, releases
from mcore_convert.spec.config.arguments import normalise
from mcore_convert.spec.config.command_line import caveats
from tests.conftest import HfMaker
from tests.oracle.test_linear_attention import HYBRID
from train_entry.config.layouts import problems_of_model
from train_entry.config.schema import Config


@pytest.mark.parametrize("shares", [(0.0, 0.0), (0.1, 0.0), (0.1, 0.4), (0.08, 0.5), (0.3, 0.3), (0.5, 0.5)])
def test_layers_follow_from_ratios_as_in_megatron_core(shares: tuple[float, float]) -> None:
    import_hybrids()
    from megatron.core.ssm.mamba_hybrid_layer_allocation import allocate_layers

    for count in (1, 9, 10, 52):
        args = {"num_layers": count, "is_hybrid_model": True, **dict(zip(hybrid.RATIOS, shares, strict=True))}
        assert hybrid.letters_of(args, count) == "".join(allocate_layers(count, *shares))


def test_what_makes_a_hybrid() -> None:
    assert hybrid.letters_of({"spec": list(hybrid.SPECS[0]), "num_layers": 3}, 3) == "MMM"
    assert hybrid.letters_of({"hybrid_layer_pattern": "M-|M*/MM/MM"}, 4) == "M-M*"
    assert hybrid.letters_of({"hybrid_attention_ratio": 0.0, "spec": None, "is_hybrid_model": False}, 2) is None
    for wrong in ("M*", 5, "MGM"):
        with pytest.raises(ConfigError, match="`hybrid_layer_pattern` = "):
            hybrid.letters_of({"hybrid_layer_pattern": wrong}, 3)


def test_the_published_layer_spec_has_these_names_and_order() -> None:
    """Megatron Core's own `mamba_stack_spec`, with stand-ins for the linear layers of Transformer Engine."""
    import_hybrids()
    from megatron.core.models.mamba import MambaModel
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # experts are not grouped without Transformer Engine
        from megatron.core.models.mamba import mamba_layer_specs

    class Fused(ColumnParallelLinear):
        def __init__(self, inner: int, *args: Any, **kwargs: Any) -> None:
            super().__init__(inner, *args, **kwargs)
            weight = self._parameters.pop("weight")
            self.layer_norm_weight = torch.nn.Parameter(torch.ones(inner))  # before the weight, as there
            self._parameters["weight"] = weight

    stand_ins = [
        (mamba_layer_specs.TELayerNormColumnParallelLinear, Fused),
        (mamba_layer_specs.TERowParallelLinear, RowParallelLinear),
        (mamba_layer_specs.TEDotProductAttention, DotProductAttention),
    ]
    args = normalise({**HYBRID, "hybrid_override_pattern": "M*-M", "num_layers": 4, "num_experts": None})
    spec = _replaced(mamba_layer_specs.mamba_stack_spec, stand_ins)
    with single_process(), without_cuda():
        model = MambaModel(
            config_of(args), spec, 32, 8, hybrid_override_pattern="M*-M", share_embeddings_and_output_weights=False
        )
        names = [name for name, _ in model.named_parameters()]
        keys = [each.key for each in model.sharded_state_dict().values() if "_extra_state" not in each.key]
    dims = Dims.of(args, vocab_size=31, padded_vocab_size=32)
    rows = [str(row.mcore) for row in in_module_order(gpt.weights(args), "transformer_engine", (0, 18))]
    first, *last = (row for row in rows if "{layer}" not in row)
    held = {row.mcore: row for row in gpt.weights(args)}
    layers = [
        row.replace("{layer}", str(layer))
        for layer in range(4)
        for row in rows
        if "{layer}" in row and held[row].in_layer(layer, dims)
    ]
    assert names == [first, *layers, *last]
    assert set(keys) == set(names)


def _replaced(spec: Any, classes: list[tuple[Any, Any]]) -> Any:
    """Return a copy of a layer spec with other classes within."""
    for old, new in classes:
        if spec is old:
            return new
    if not dataclasses.is_dataclass(spec) or isinstance(spec, type):
        return spec
    parts = {each.name: _replaced(getattr(spec, each.name), classes) for each in dataclasses.fields(spec)}
    return dataclasses.replace(spec, **parts)


@pytest.fixture
def tiny(hf_checkpoint: HfMaker, tmp_path: Path) -> Path:
    return hf_checkpoint("nemotron_h")


def test_logits_are_those_of_transformers(hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    """Of Megatron Core's own `MambaModel`, whose recurrence is computed step by step.

    There are as many inner channels as states, and as many of either as the model has: no shape tells what is what.
    """
    sizes = {"hidden_size": 16, "mamba_num_heads": 4, "mamba_head_dim": 4, "n_groups": 4, "ssm_state_size": 4}
    square = shutil.copytree(hf_checkpoint("nemotron_h", fill="normal", config=sizes), tmp_path / "square")
    convert(square, tmp_path / "mcore", to="torch", tp=2, pp=2, ep=2, etp=1)
    report = verify(square, tmp_path / "mcore", logits=True)
    assert report.equal
    assert report.logits is not None
    assert report.logits.difference < 2e-5
    assert report.logits.largest_logit > 1
    file = square / "model.safetensors"
    right = load_file(file)
    for swapped in _slips(right):
        save_file({**right, **swapped}, file, metadata={"format": "pt"})
        assert not verify(square, tmp_path / "mcore").equal


def _slips(state: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Yield the first mixer with neighbouring segments exchanged, or its convolution turned around."""
    name = "backbone.layers.0.mixer."
    z, x, b, c, dt = state[name + "in_proj.weight"].split([16, 16, 16, 16, 4])
    yield {name + "in_proj.weight": torch.cat([x, z, b, c, dt])}
    yield {name + "in_proj.weight": torch.cat([z, x, c, b, dt])}
    yield {name + "conv1d.weight": state[name + "conv1d.weight"].flip(-1).contiguous()}


def test_the_recurrence_is_that_of_one_position_after_the_other() -> None:
    """An independent computation, element by element, in float64."""
    generator = torch.Generator().manual_seed(0)
    x, dt = torch.randn(1, 4, 4, 2, generator=generator), torch.randn(1, 4, 4, generator=generator)
    b, c = (torch.randn(1, 4, 2, 3, generator=generator) for _ in "bc")
    decay, skip, bias = -torch.rand(4, generator=generator), torch.randn(4, generator=generator), torch.ones(4)
    result = scan(x, dt, decay, b, c, 8, D=skip, dt_bias=bias)
    for head in range(4):
        for channel in range(2):
            state = [0.0] * 3
            for at in range(4):
                step = torch.log1p(torch.exp(dt[0, at, head].double() + 1)).item()
                value = x[0, at, head, channel].item()
                keep = torch.exp(torch.tensor(step * decay[head].item())).item()
                state = [old * keep + step * value * new for old, new in zip(state, b[0, at, head // 2], strict=True)]
                wanted = sum(float(s * r) for s, r in zip(state, c[0, at, head // 2], strict=True))
                assert abs(result[0, at, head, channel].item() - wanted - skip[head].item() * value) < 1e-5
    assert torch.equal(rearrange(x, "b l h p -> l b (h p)"), x.permute(1, 0, 2, 3).reshape(4, 1, 8))
    assert torch.equal(rearrange(x, "b l h (g p) -> b g l h p", g=2)[:, 1], x[..., 1:])


def test_a_model_as_transformers_holds_it_is_read(tiny: Path, tmp_path: Path) -> None:
    """Under `model`, with the experts of a layer in one tensor."""
    held = shutil.copytree(tiny, tmp_path / "held")
    state = {name.replace("backbone.", "model."): each for name, each in load_file(tiny / "model.safetensors").items()}
    for matrix in ("up_proj", "down_proj"):
        names = [f"model.layers.5.mixer.experts.{expert}.{matrix}.weight" for expert in range(8)]
        state[f"model.layers.5.mixer.experts.{matrix}"] = torch.stack([state.pop(name) for name in names])
    save_file(state, held / "model.safetensors", metadata={"format": "pt"})
    assert verify(tiny, held).equal


def test_stages_that_are_not_even_stand_in_the_pattern(tiny: Path, tmp_path: Path) -> None:
    convert(tiny, tmp_path / "even", to="torch", pp=2)
    args = identify(tmp_path / "even").checkpoint.common.args or {}
    assert (args["hybrid_layer_pattern"], args["hybrid_override_pattern"]) == ("M-M*ME*-", "M-M*ME*-")
    reshard(tmp_path / "even", tmp_path / "virtual", to="torch", pp=2, vpp=2, tp=2)
    stored = identify(tmp_path / "virtual")
    args = stored.checkpoint.common.args or {}
    assert (args["hybrid_layer_pattern"], args["hybrid_override_pattern"]) == ("M-|M*|ME|*-", None)
    assert args["num_layers_per_virtual_pipeline_stage"] is None
    assert Layout.of(args) == Layout.of(stored.args)
    assert [len(layers) for layers in Layout.of(args).stages(8).values()] == [2, 2, 2, 2]
    line = (tmp_path / "virtual" / "megatron_args.txt").read_text()
    assert "--hybrid-layer-pattern 'M-|M*|ME|*-'" in line
    assert "pipeline-model-parallel-layout" not in line
    reshard(tmp_path / "virtual", tmp_path / "uneven", to="torch_dist", pp=2, pipeline_layout="Ettt|tttttL")
    assert (identify(tmp_path / "uneven").checkpoint.common.args or {})["hybrid_layer_pattern"] == "M-M|*ME*-"
    for path in ("virtual", "uneven"):
        assert verify(tiny, tmp_path / path).equal
        assert verify(tmp_path / "even", tmp_path / path).equal
    with pytest.raises(LayoutError, match=r"the stages of a hybrid are even, .* before Megatron-LM 0.17"):
        convert(tiny, tmp_path / "old", to="torch", pp=2, vpp=2, for_megatron="0.16")
    with pytest.raises(LayoutError, match=r"experts in a hybrid need Megatron-LM 0.16"):
        convert(tiny, tmp_path / "old", to="torch", for_megatron="0.15")


def test_mixers_of_another_width_are_for_releases_that_have_a_flag_for_it() -> None:
    args = normalise({**HYBRID, "hybrid_override_pattern": "M*M--M", "num_experts": None})
    dims = Dims.of(args, vocab_size=31, padded_vocab_size=32)
    with pytest.raises(LayoutError, match=r"Mamba layers that are 40 wide, and not 32, need Megatron-LM 0.13"):
        pattern_arguments(Layout(), dims, (0, 12))
    assert pattern_arguments(Layout(), dims, (0, 13))["hybrid_override_pattern"] == "M*M--M"


def test_the_convolution_is_called_as_the_release_calls_it(tiny: Path, tmp_path: Path) -> None:
    """Up to 0.18 it is a module, and since 0.19 two parameters of the mixer, before all others."""
    names = {}
    for release in ("0.16", "0.19"):
        convert(tiny, tmp_path / release, to="torch", for_megatron=release)
        file = tmp_path / release / "release" / "mp_rank_00" / "model_optim_rng.pt"
        model = torch.load(file, weights_only=False)["model"]
        names[release] = [name.removeprefix("decoder.layers.0.mixer.") for name in model if "layers.0.mixer." in name]
        assert verify(tiny, tmp_path / release).equal
    own = ["dt_bias", "A_log", "D"]
    assert names["0.16"][:3] == own
    assert names["0.16"].index("conv1d.weight") > names["0.16"].index("in_proj.weight")
    assert names["0.19"][:5] == ["conv1d_weight", "conv1d_bias", *own]
    old = identify(tmp_path / "0.16").checkpoint.common.args or {}
    assert (old["hybrid_override_pattern"], old["hybrid_layer_pattern"]) == ("M-M*ME*-", None)
    assert "--hybrid-override-pattern 'M-M*ME*-'" in (tmp_path / "0.16" / "megatron_args.txt").read_text()
    assert any("`pretrain_mamba.py`" in line for line in caveats(old))
    signs = {"mamba_training_ssm_states_dtype": None, "muon_scalar_optimizer": "adam", "batch_invariant_mode": False}
    assert releases.of_run(signs) == (0, 19)


def test_a_configuration_says_its_layers_in_several_ways(tiny: Path, tmp_path: Path) -> None:
    names = {"M": "mamba", "*": "full_attention", "-": "mlp", "E": "moe"}
    config = json.loads((tiny / "config.json").read_text())
    pattern = config.pop("hybrid_override_pattern")
    del config["num_hidden_layers"]
    family = identify(tiny).family.config
    as_transformers_5 = {
        **config,
        "layers_block_type": [names[letter] for letter in pattern],
        "time_step_limit": [0.0, {"__float__": "Infinity"}],
    }
    args = family.to_megatron(as_transformers_5)
    assert args["hybrid_layer_pattern"] == pattern
    assert family.to_hf(normalise(args))["hybrid_override_pattern"] == pattern
    with pytest.raises(ConfigError) as error:
        family.to_megatron({**as_transformers_5, "hybrid_override_pattern": "M" * 8})
    assert any("differ" in line for line in error.value.items)
    dense = family.to_megatron({**config, "hybrid_override_pattern": "M-*", "num_experts_per_tok": 1})
    assert "num_experts" not in dense


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"hybrid_override_pattern": "M*GE-M"}, "has the layers G"),
        ({"hybrid_layer_pattern": "M*ME-M/*E"}, "has layers that predict further tokens"),
        ({"multi_latent_attention": True}, "with `multi_latent_attention` = True"),
        ({"qk_layernorm": True}, "with `qk_layernorm` = True"),
        ({"mtp_num_layers": 1}, "with `mtp_num_layers` = 1"),
        ({"moe_latent_size": 4}, "`moe_latent_size` = 4"),
    ],
    ids=str,
)
def test_layers_that_are_not_known_are_refused(changed: dict[str, Any], reason: str) -> None:
    assert any(reason in line for line in gpt.refusals({**HYBRID, **changed}))
    assert gpt.refusals(HYBRID) == []


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"position_embedding_type": "rope"}, "`position_embedding_type` = 'rope', the family has 'none'"),
        ({"layernorm_epsilon": 1e-6}, "`layernorm_epsilon` = 1e-06, and the norm within a Mamba layer has 1e-05"),
        ({"spec": ["my.specs", "stack"]}, "`spec` = ['my.specs', 'stack'], which may build other layers"),
        ({"hybrid_layer_pattern": "M-M*ME*-/*E"}, "has layers that predict further tokens"),
        ({"moe_shared_expert_gate": True}, "`moe_shared_expert_gate` = True"),
    ],
    ids=str,
)
def test_what_hugging_face_has_not_is_refused(changed: dict[str, Any], reason: str, tiny: Path) -> None:
    family = identify(tiny).family.config
    args = normalise(family.to_megatron(json.loads((tiny / "config.json").read_text())))
    assert family.refusals(args) == []
    assert any(reason in line for line in family.refusals({**args, **changed}))


def test_it_is_refused_where_nothing_holds_it(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(MappingError, match="`fsdp_dtensor` does not hold"):
        convert(tiny, tmp_path / "fsdp", to="fsdp_dtensor")
    with pytest.raises(LayoutError, match="`mamba_num_groups` = 4 cannot be split over tp = 8"):
        convert(tiny, tmp_path / "many", to="torch", tp=8)
    assert any("hybrid" in line and "not trained here" in line for line in problems_of_model(Config(), HYBRID))
    with pytest.raises(ConfigError, match="`mamba_num_heads` = 8 cannot be shared by `mamba_num_groups` = 3"):
        Dims.of(normalise({**HYBRID, "mamba_num_groups": 3}), vocab_size=31, padded_vocab_size=32)
    damaged = shutil.copytree(tiny, tmp_path / "damaged")
    (damaged / "config.json").write_text((damaged / "config.json").read_text().replace("Infinity", "NaN"))
    with pytest.raises(ConvertError, match="it says NaN"):
        identify(damaged)
