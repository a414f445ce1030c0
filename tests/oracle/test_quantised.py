"""Quantised Hugging Face models become Megatron's and plain ones, with the values that torch decodes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from fixtures.quantised import FORMS, Tensors, mxfp4, quantise
from mcore_convert import convert, diff, export, inspect, load_hf_model, verify
from mcore_convert.cli.inspect import report
from mcore_convert.errors import ConfigError, MappingError
from tests.conftest import HfMaker
from tests.tensors import assert_same_tensors, hf_tensors

ODD = {  # no size is a multiple of 128
    "hidden_size": 160,
    "intermediate_size": 208,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 40,
    "num_hidden_layers": 2,
}


@pytest.fixture(scope="module")
def plain(hf_checkpoint: HfMaker) -> Path:
    return hf_checkpoint("llama-gqa", dtype="bfloat16", fill="normal", config=ODD)


@pytest.fixture(scope="module")
def fp8(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensors]:
    path = tmp_path_factory.mktemp("quantised") / "fp8"
    return path, quantise(plain, path, "fp8")


@pytest.mark.parametrize("form", FORMS)
def test_a_quantised_model_is_the_model_that_torch_decodes(form: str, plain: Path, tmp_path: Path) -> None:
    decoded = quantise(plain, tmp_path / "source", form)
    convert(tmp_path / "source", tmp_path / "ranks", to="torch", tp=2, pp=2)
    convert(tmp_path / "ranks", tmp_path / "hf")
    assert_same_tensors(hf_tensors(tmp_path / "hf"), decoded)
    assert verify(tmp_path / "source", tmp_path / "ranks").equal


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_experts_in_fp8_over_ranks_of_their_own(name: str, hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    plain = hf_checkpoint(name, dtype="bfloat16", fill="normal", config={"hidden_size": 136})
    decoded = quantise(plain, tmp_path / "source", "fp8")
    assert sum(tensor.dtype == torch.float8_e4m3fn for tensor in hf_tensors(tmp_path / "source").values()) > 50
    convert(tmp_path / "source", tmp_path / "dist", tp=2, ep=2)
    convert(tmp_path / "source", tmp_path / "ranks", to="torch", tp=2, pp=2, ep=2)
    for folder in ("dist", "ranks"):
        convert(tmp_path / folder, tmp_path / f"{folder}-hf")
        assert_same_tensors(hf_tensors(tmp_path / f"{folder}-hf"), decoded)


def test_transformers_loads_the_same_model(hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    """Its own decoding on a CPU, of sizes that it takes, gives the logits of what is converted."""
    plain = hf_checkpoint(
        "llama-gqa", dtype="bfloat16", fill="normal", config={**ODD, "hidden_size": 128, "intermediate_size": 224}
    )
    quantise(plain, tmp_path / "source", "fp8 small blocks")  # for its configuration
    tensors, sizes = load_file(plain / "model.safetensors"), [16, 8]
    stored = Tensors()
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            rows, columns = tensor.shape[0] // sizes[0], tensor.shape[1] // sizes[1]
            blocks = tensor.float().reshape(rows, sizes[0], columns, sizes[1])
            scales = blocks.abs().amax((1, 3)) / 448
            codes = (blocks / scales[:, None, :, None]).reshape(tensor.shape).to(torch.float8_e4m3fn)
            stored |= {name: codes, f"{name}_scale_inv": scales}
        else:
            stored[name] = tensor
    save_file(stored, tmp_path / "source/model.safetensors", {"format": "pt"})
    change_settings(tmp_path / "source", weight_block_size=sizes, scale_fmt="float")
    convert(tmp_path / "source", tmp_path / "dist", tp=2)
    tokens = torch.arange(40)[None]
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "source", dtype=torch.bfloat16)
    ours = load_hf_model(tmp_path / "dist")
    for (name, mine), (_, other) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert torch.equal(mine, other), name
    assert torch.equal(ours(tokens).logits, theirs(tokens).logits)


def test_the_mxfp4_that_codecs_are_held_to_is_that_of_transformers() -> None:
    stored, wanted = mxfp4(64, 64, experts=3)
    assert torch.equal(convert_moe_packed_tensors(stored["_blocks"], stored["_scales"]), wanted)


def change_settings(path: Path, **settings: Any) -> Path:
    """Change what `quantization_config` says; a None leaves a key out."""
    config = json.loads((path / "config.json").read_text())
    kept = {key: value for key, value in {**config["quantization_config"], **settings}.items() if value is not ...}
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": kept}))
    return path


def test_an_export_and_a_dry_run_of_a_quantised_model(fp8: tuple[Path, Tensors], tmp_path: Path) -> None:
    path, decoded = fp8
    planned = convert(path, tmp_path / "nowhere", dry_run=True)
    assert planned.notes[0] == "decoded to bfloat16: 10 tensors in float8_e4m3fn, blocks of 128 x 128"
    assert planned.as_dict()["expected_memory"] < 512 * 2**20
    assert not (tmp_path / "nowhere").exists()
    export(path, tmp_path / "wide", dtype="float32")
    wide = hf_tensors(tmp_path / "wide")
    codes = load_file(path / "model.safetensors")
    for name, tensor in wide.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor.bfloat16(), decoded[name]), name
        if f"{name}_scale_inv" in codes:  # rounded once: the product in fp32, and not that of bf16 widened
            scales = codes[f"{name}_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
            assert torch.equal(tensor, codes[name].float() * scales[: tensor.shape[0], : tensor.shape[1]]), name


def test_the_carried_configuration_is_that_of_the_weights(fp8: tuple[Path, Tensors], tmp_path: Path) -> None:
    """`hf/` beside Megatron's files is read on the way back, where nothing is quantised any more."""
    path, decoded = fp8
    convert(path, tmp_path / "dist")
    carried = tmp_path / "dist/release/hf/config.json"
    assert "quantization_config" not in json.loads(carried.read_text())
    shutil.copy(path / "config.json", carried)  # as another program carries it along
    convert(tmp_path / "dist", tmp_path / "hf")
    assert_same_tensors(hf_tensors(tmp_path / "hf"), decoded)
    assert "quantization_config" not in json.loads((tmp_path / "hf/config.json").read_text())


def test_values_are_looked_at_decoded(fp8: tuple[Path, Tensors], plain: Path, tmp_path: Path) -> None:
    path, decoded = fp8
    convert(path, tmp_path / "hf", to="hf")
    result = diff(tmp_path / "hf", path)
    assert not any(change.num_changed for change in result.changes)
    wanted = decoded["model.layers.1.mlp.down_proj.weight"].double()
    (weight,) = (w for w in inspect(path, stats=True).statistics if w.name == "decoder.layers.1.mlp.linear_fc2.weight")
    assert weight.norm == pytest.approx(float(wanted.norm()), rel=1e-5)
    assert weight.dtype == "bfloat16"


REFUSED = [
    ({"quant_method": "gptq"}, '`quant_method` = "gptq" is none of fp8, compressed-tensors, mxfp4'),
    ({"activation_scheme": "static"}, '`activation_scheme` = "static"'),
    ({"fmt": "e5m2"}, '`fmt` = "e5m2"'),
    ({"weight_block_size": [128]}, "`weight_block_size` = [128] is no pair of sizes"),
    ({"desc_act": True}, "unknown key `desc_act` = true"),
    (
        {"weight_block_size": [64, 128]},
        "model.layers.{0...1}.mlp.down_proj.weight: scales are [2, 2], and the blocks [3, 2]",
    ),
]


@pytest.mark.parametrize(("settings", "line"), REFUSED, ids=[line for _, line in REFUSED])
def test_what_is_not_understood_is_refused_by_name(
    settings: dict[str, Any], line: str, fp8: tuple[Path, Tensors], tmp_path: Path
) -> None:
    shutil.copytree(fp8[0], tmp_path / "source")
    change_settings(tmp_path / "source", **settings)
    with pytest.raises(ConfigError, match="quantised in a way that is not known") as caught:
        convert(tmp_path / "source", tmp_path / "dist")
    assert line in caught.value.items
    assert inspect(tmp_path / "source").family is None  # it can be looked at all the same


def test_groups_that_are_not_understood_are_refused_by_name(plain: Path, tmp_path: Path) -> None:
    quantise(plain, tmp_path / "source", "int4")
    config = json.loads((tmp_path / "source/config.json").read_text())
    group = config["quantization_config"]["config_groups"]["group_0"]
    group["weights"] |= {"actorder": "group", "num_bits": 3}
    group["input_activations"] = {"num_bits": 8, "dynamic": False}
    change_settings(tmp_path / "source", config_groups={"group_0": group}, kv_cache_scheme={"num_bits": 8})
    with pytest.raises(ConfigError) as caught:
        convert(tmp_path / "source", tmp_path / "dist")
    assert caught.value.items == (
        '`kv_cache_scheme` = {"num_bits": 8}',
        "`config_groups.group_0.input_activations.dynamic` = false",
        "`config_groups.group_0.weights.num_bits` = 3",
        '`config_groups.group_0.weights.actorder` = "group"',
    )


def test_codes_without_scales_and_scales_without_codes_have_no_place(fp8: tuple[Path, Tensors], tmp_path: Path) -> None:
    shutil.copytree(fp8[0], tmp_path / "source")
    tensors = load_file(tmp_path / "source/model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    scale = tensors.pop(f"{name}_scale_inv")
    save_file(tensors, tmp_path / "source/model.safetensors", {"format": "pt"})
    with pytest.raises(MappingError) as caught:
        convert(tmp_path / "source", tmp_path / "dist")
    assert "float8_e4m3fn" in str(caught.value.items)
    tensors[f"{name}_scale_inv"] = scale
    tensors[name] = tensors[name].to(torch.bfloat16)
    tensors["model.layers.0.input_layernorm.weight_scale_inv"] = scale.clone()
    save_file(tensors, tmp_path / "source/model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError) as refused:
        convert(tmp_path / "source", tmp_path / "dist")
    assert len(refused.value.items) == 2


def test_a_quantised_source_is_reported_with_what_decoding_costs(
    fp8: tuple[Path, Tensors], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, decoded = fp8
    stored = load_file(path / "model.safetensors")
    coded = [name for name in decoded if f"{name}_scale_inv" in stored]
    nbytes = sum(stored[n].nbytes for name in coded for n in (name, f"{name}_scale_inv"))
    inspection = inspect(path, html=tmp_path / "page.html")
    assert inspection.nbytes == sum(tensor.nbytes for tensor in stored.values())
    assert inspection.dtypes == ("bfloat16", "float32", "float8_e4m3fn")
    assert inspection.quantised is not None
    form = "float8_e4m3fn, blocks of 128 x 128"
    assert (inspection.quantised.method, inspection.quantised.forms, inspection.quantised.num_tensors) == (
        "fp8",
        (form,),
        10,
    )
    assert inspection.quantised.nbytes == nbytes
    assert inspection.quantised.decoded == sum(decoded[name].nbytes for name in coded)
    assert inspection.as_dict()["quantised"]["dtype"] == "bfloat16"
    assert f"bfloat16, from {form}" in (tmp_path / "page.html").read_text().replace("<wbr>", "")
    report(inspection)
    assert f"10 tensors in {form} (fp8); decoded, " in capsys.readouterr().out
    assert {line.dtype for line in inspection.weights} == {"bfloat16"}

    export(path, tmp_path / "hf")
    assert f"| decoded | 10 tensors in {form}, to bfloat16 |" in (tmp_path / "hf/README.md").read_text()
    manifest = json.loads((tmp_path / "hf/mcore_convert.json").read_text())
    assert manifest["decoded"] == {
        "method": "fp8",
        "forms": [form],
        "num_tensors": 10,
        "nbytes": nbytes,
        "decoded": inspection.quantised.decoded,
        "dtype": "bfloat16",
    }
    name = coded[0]
    assert manifest["tensors"][name]["from"] == [name, f"{name}_scale_inv"]
    assert "decoded" not in json.loads(convert_plain(tmp_path).read_text())


def convert_plain(tmp_path: Path) -> Path:
    """Return the manifest of a conversion of what is not quantised any more."""
    convert(tmp_path / "hf", tmp_path / "again")
    return tmp_path / "again/release/mcore_convert.json"


@pytest.mark.parametrize("settings", [{"type": ["int"]}, {"strategy": {}}, {"group_size": "x"}, {"num_bits": 10**30}])
def test_nonsense_in_a_group_is_refused_by_name(settings: dict[str, Any], plain: Path, tmp_path: Path) -> None:
    quantise(plain, tmp_path / "source", "int4")
    config = json.loads((tmp_path / "source/config.json").read_text())
    groups = config["quantization_config"]["config_groups"]
    groups["group_0"]["weights"] |= settings
    change_settings(tmp_path / "source", config_groups=groups)
    with pytest.raises(ConfigError) as caught:
        convert(tmp_path / "source", tmp_path / "dist")
    assert f"weights.{next(iter(settings))}`" in str(caught.value.items)


def test_blocks_larger_than_any_weight_are_one(fp8: tuple[Path, Tensors], tmp_path: Path) -> None:
    """A size that no number of a processor holds is a size all the same."""
    shutil.copytree(fp8[0], tmp_path / "source")
    tensors = load_file(tmp_path / "source/model.safetensors")
    wanted = {}
    for name in [name for name in tensors if name.endswith("_scale_inv")]:
        tensors[name] = tensors[name][:1, :1].clone()
        codes = name.removesuffix("_scale_inv")
        wanted[codes] = (tensors[codes].float() * tensors[name]).bfloat16()
    save_file(tensors, tmp_path / "source/model.safetensors", {"format": "pt"})
    change_settings(tmp_path / "source", weight_block_size=[10**30, 10**30])
    convert(tmp_path / "source", tmp_path / "hf", to="hf")
    actual = hf_tensors(tmp_path / "hf")
    assert all(torch.equal(actual[name], tensor) for name, tensor in wanted.items())
