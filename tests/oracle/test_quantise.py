"""Weights quantised as they are exported: the codes that torch makes, and a loss that `verify` tells from damage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from fixtures.quantised import Tensors, in_words
from mcore_convert import convert, export, inspect, verify, verify_files
from mcore_convert.cli import app
from mcore_convert.errors import ConfigError, ConvertError
from tests.conftest import HfMaker
from tests.tensors import assert_same_tensors, hf_tensors

SIZES = {  # some of them one block, some several, some that blocks do not divide
    "hidden_size": 256,
    "intermediate_size": 320,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "num_hidden_layers": 2,
}


@pytest.fixture(scope="module")
def plain(hf_checkpoint: HfMaker) -> Path:
    return hf_checkpoint("llama-gqa", dtype="bfloat16", fill="normal", config=SIZES)


@pytest.fixture(scope="module")
def ranks(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model cut over ranks, so that a block of it lies in several files."""
    path = tmp_path_factory.mktemp("quantise") / "ranks"
    convert(plain, path, to="torch", tp=4, pp=2)
    return path


@pytest.fixture(scope="module")
def fp8(ranks: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("quantise") / "fp8"
    export(ranks, path, quantize="fp8-block")
    return path


def test_fp8_has_the_codes_that_torch_rounds_to(fp8: Path, plain: Path) -> None:
    stored, wanted, quantised = hf_tensors(fp8), hf_tensors(plain), 0
    for name, tensor in wanted.items():
        linear = "_proj" in name
        if not linear or 320 in tensor.shape:
            assert torch.equal(stored[name], tensor)
            continue
        quantised += 1
        rows, columns = -(-tensor.shape[0] // 128), -(-tensor.shape[1] // 128)
        for row in range(rows):
            for column in range(columns):
                at = slice(row * 128, row * 128 + 128), slice(column * 128, column * 128 + 128)
                block = tensor[at].float()
                scale = block.abs().max() / 448
                assert stored[f"{name}_scale_inv"][row, column] == scale
                codes = (block / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
                assert torch.equal(stored[name][at].view(torch.uint8), codes.view(torch.uint8)), name
    assert quantised == 8
    assert len(stored) == len(wanted) + quantised


def test_the_configuration_names_what_is_left(fp8: Path) -> None:
    config = json.loads((fp8 / "config.json").read_text())
    left = config["quantization_config"].pop("modules_to_not_convert")
    assert {"lm_head", "model.layers.1.mlp.down_proj"} <= {*left}
    assert not any("self_attn" in name for name in left)
    assert config["quantization_config"] == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }


def test_transformers_loads_what_is_quantised(fp8: Path, tmp_path: Path) -> None:
    """Its own decoding on a CPU has the values of ours."""
    convert(fp8, tmp_path / "decoded", to="hf")
    theirs = dict(AutoModelForCausalLM.from_pretrained(fp8, dtype=torch.bfloat16).named_parameters())
    ours = hf_tensors(tmp_path / "decoded")
    assert_same_tensors({name: tensor.detach() for name, tensor in theirs.items()}, ours)


def test_int4_has_the_codes_of_its_groups(ranks: Path, plain: Path, tmp_path: Path) -> None:
    export(ranks, tmp_path / "int4", quantize="int4")
    stored = hf_tensors(tmp_path / "int4")
    for name, tensor in hf_tensors(plain).items():
        if "_proj" not in name:
            assert torch.equal(stored[name], tensor)
            continue
        groups = tensor.float().reshape(tensor.shape[0], -1, 32)
        scales = (groups.abs().amax(2) / 7).bfloat16()
        codes = (groups / scales.float()[..., None]).round().clamp(-7, 7).reshape(tensor.shape) + 8
        assert torch.equal(stored[f"{name}_scale"], scales)
        assert torch.equal(stored[f"{name}_packed"], in_words(codes.long(), 4))
        assert stored[f"{name}_shape"].tolist() == list(tensor.shape)
    inspection = inspect(tmp_path / "int4").quantised
    assert inspection is not None
    assert (inspection.forms, inspection.num_tensors) == (("int4, groups of 32",), 14)
    result = verify(plain, tmp_path / "int4")
    assert len(result.differences) == 8
    assert result.within_loss


def test_what_is_quantised_is_reported_and_kept_in_manifest_and_card(ranks: Path, fp8: Path, tmp_path: Path) -> None:
    planned = export(ranks, tmp_path / "nowhere", quantize="fp8-block", dry_run=True)
    line = (
        "quantised: 8 tensors in float8_e4m3fn, blocks of 128 x 128; at most 1/16 of a value, "
        "or 1/458,752 of the largest"
    )
    assert any(note.startswith(line) for note in planned.notes)
    assert planned.files["model.safetensors"] == (fp8 / "model.safetensors").stat().st_size
    manifest = json.loads((fp8 / "mcore_convert.json").read_text())
    assert manifest["options"]["quantize"] == "fp8-block"
    assert manifest["quantised"]["num_tensors"] == 8
    name = "model.layers.0.self_attn.q_proj.weight"
    assert manifest["tensors"][f"{name}_scale_inv"]["from"] == manifest["tensors"][name]["from"]
    assert manifest["tensors"][name]["from"]
    assert verify_files(fp8).intact
    assert (
        "| quantised | 8 tensors in float8_e4m3fn, blocks of 128 x 128; at most 1/16" in (fp8 / "README.md").read_text()
    )


def test_verify_tells_what_quantisation_loses_from_damage(plain: Path, ranks: Path, fp8: Path, tmp_path: Path) -> None:
    runner = CliRunner()
    for source in (plain, ranks):
        result = verify(source, fp8)
        assert not result.equal
        assert result.within_loss
        assert len(result.differences) == 4  # the weights of both layers that have q, k and v, and the projection
    done = runner.invoke(app, ["verify", str(plain), str(fp8)])
    assert done.exit_code == 1
    assert done.stdout.splitlines()[-1] == "different, by no more than quantisation loses"
    assert runner.invoke(app, ["verify", str(plain), str(fp8), "--allow-loss"]).exit_code == 0

    tensors = load_file(fp8 / "model.safetensors")
    name = "model.layers.1.self_attn.o_proj.weight"
    codes = tensors[name].view(torch.uint8)
    codes[17, 200] += 1 if codes[17, 200] & 0x7F < 0x7E else -1  # one code off by one step
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    save_file(tensors, damaged / "model.safetensors", {"format": "pt"})
    (damaged / "config.json").write_text((fp8 / "config.json").read_text())
    result = verify(plain, damaged)
    assert not result.within_loss
    assert [d.name for d in result.differences if not d.is_loss] == [
        "decoder.layers.1.self_attention.linear_proj.weight"
    ]
    done = runner.invoke(app, ["verify", str(plain), str(damaged), "--allow-loss"])
    assert done.exit_code == 1
    assert done.stdout.splitlines()[-1] == "different"
    assert "beyond it" in done.stdout


def test_quantised_weights_come_back_to_megatron(fp8: Path, tmp_path: Path) -> None:
    convert(fp8, tmp_path / "dist", tp=2)
    assert verify(fp8, tmp_path / "dist").equal
    assert not verify(tmp_path / "dist", fp8).differences


def test_experts_are_quantised_and_routers_are_not(hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    plain = hf_checkpoint("qwen3_moe", dtype="bfloat16", fill="normal", config={"num_hidden_layers": 2})
    export(plain, tmp_path / "fp8", quantize="fp8-block", with_tokenizer=False)
    stored = hf_tensors(tmp_path / "fp8")
    scaled = {name.removesuffix("_scale_inv") for name in stored if name.endswith("_scale_inv")}
    assert scaled == {name for name in stored if name.endswith("_proj.weight")}
    assert verify(plain, tmp_path / "fp8").within_loss


def test_what_cannot_be_quantised_is_refused(plain: Path, hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not quantised to `fp4`"):
        export(plain, tmp_path / "out", quantize="fp4")
    gpt2 = hf_checkpoint("gpt2", fill="normal")  # its matrices are stored the other way round
    with pytest.raises(ConfigError, match="no weight of this model can be quantised"):
        export(gpt2, tmp_path / "out", quantize="int4")
    (tmp_path / "nan").mkdir()
    tensors: Tensors = load_file(plain / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.weight"][3, 4] = float("nan")
    save_file(tensors, tmp_path / "nan/model.safetensors", {"format": "pt"})
    (tmp_path / "nan/config.json").write_text((plain / "config.json").read_text())
    with pytest.raises(ConvertError, match="has numbers that are not finite"):
        export(tmp_path / "nan", tmp_path / "out", quantize="fp8-block", with_tokenizer=False)
    assert not (tmp_path / "out").exists()
